"""What test_torchrec_install.py runs in other processes."""

import os
import tempfile


def train_here(rank):
    """One rank trains a step, in a process without a process group yet -> whose class computed."""
    import torch.distributed as dist
    from torchrec_models import Case, shard, tbes, train_step

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=1)
        model = shard(Case(num_tables=1))
        train_step(model, Case(num_tables=1), 0)
        dist.destroy_process_group()
    return type(tbes(model)[0]).__module__.split(".")[0]


def install_and_train(rank):
    import torchrec_integration

    torchrec_integration.install()
    return train_here(rank)


def train_without_install():
    """On a rank, after others have installed and uninstalled -> whose classes computed."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec_models import Case, shard, tbes

    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD})
    model = shard(Case(kernels=("fused",)), sharder)
    return [type(tbe).__module__.split(".")[0] for tbe in tbes(model)]
