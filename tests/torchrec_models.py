"""Small sharded models, run on every rank: what tests of TorchRec send to `torchrec_ranks.run_on_ranks`.

Results are plain numbers and whole tables, put together from the shards of all ranks, so that a test can compare one
way of sharding or computing with another.
"""

import contextlib
import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingPlan

import torchrec_integration

ROWS, SAMPLES = 24, 3  # of a table; of a batch
LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of some tables with one feature each, and how it is trained.

    kernels and shardings go by table, as far as they reach; the last one serves the rest.
    """

    kernels: tuple[str, ...] = ("fused_triton",)
    shardings: tuple[str, ...] = ("table_wise",)
    num_tables: int = 3
    dim: int = 8
    poolings: tuple[str, ...] = ("SUM",)
    sequence: bool = False
    weighted: bool = False
    shared: bool = False  # table 0 has a second feature
    dtypes: tuple[str, ...] = ("FP32",)
    fused_params: tuple[tuple[str, Any], ...] = ()
    fused_everywhere: bool = False  # install(fused=True)
    steps: int = 3
    index_dtype: torch.dtype = torch.int64
    optimizer: str = "EXACT_ROWWISE_ADAGRAD"
    batch_sizes: tuple[int, ...] = ()  # of each feature (VBE); empty = SAMPLES for all
    several_groups: bool = False  # tables go into two TBEs, by an option that changes nothing for fp32

    def of_table(self, name, table):
        values = getattr(self, name)
        return values[min(table, len(values) - 1)]

    @property
    def features(self):
        return [f"f{table}" for table in range(self.num_tables)] + (["f0b"] if self.shared else [])


@contextlib.contextmanager
def installed(**arguments):
    torchrec_integration.install(**arguments)
    try:
        yield
    finally:
        torchrec_integration.uninstall()


@contextlib.contextmanager
def logged():
    """The messages of torchrec_integration's logger, as they come."""
    messages, logger = [], logging.getLogger("torchrec_integration")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    level, logger.propagate = logger.level, False
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def make_sharder(case):
    params = {"optimizer": EmbOptimType[case.optimizer], "learning_rate": LEARNING_RATE} | dict(case.fused_params)
    if case.sequence:
        return torchrec_integration.TritonEmbeddingCollectionSharder(params)
    return torchrec_integration.TritonEmbeddingBagCollectionSharder(params)


def make_collection(case):
    tables = []
    for table in range(case.num_tables):
        common = {
            "name": f"t{table}",
            "num_embeddings": ROWS,
            "embedding_dim": case.dim,
            "feature_names": [f"f{table}", "f0b"] if case.shared and table == 0 else [f"f{table}"],
            "data_type": torchrec.DataType[case.of_table("dtypes", table)],
        }
        if case.sequence:
            tables.append(torchrec.EmbeddingConfig(**common))
        else:
            pooling = torchrec.PoolingType[case.of_table("poolings", table)]
            tables.append(torchrec.EmbeddingBagConfig(pooling=pooling, **common))
    if case.sequence:
        return torchrec.EmbeddingCollection(tables=tables, device=torch.device("meta"))
    return torchrec.EmbeddingBagCollection(tables=tables, is_weighted=case.weighted, device=torch.device("meta"))


def make_plan(case, collection, sharder, world_size=None, device_type="cpu"):
    world_size = world_size or dist.get_world_size()
    local_size = min(world_size, torchrec.distributed.comm.get_local_size())
    makers = {}
    for table in range(case.num_tables):
        kernel = case.of_table("kernels", table)
        makers[f"t{table}"] = {
            "table_wise": lambda k=kernel, t=table: table_wise(rank=t % world_size, compute_kernel=k),
            "row_wise": lambda k=kernel: row_wise(compute_kernel=k),
            "column_wise": lambda k=kernel: column_wise(ranks=[r % world_size for r in (0, 1)], compute_kernel=k),
            "column_wise_here": lambda k=kernel: column_wise(ranks=[0, 0], compute_kernel=k),
            "table_row_wise": lambda t=table: table_row_wise(host_index=t % (world_size // local_size)),
            "grid_shard": lambda: grid_shard(host_indexes=list(range(world_size // local_size))),
            "data_parallel": data_parallel,
        }[case.of_table("shardings", table)]()
    plan = construct_module_sharding_plan(collection, makers, sharder, local_size, world_size, device_type)
    for table in range(case.num_tables):
        if plan[f"t{table}"].sharding_type != "data_parallel":  # two of the makers cannot be told the kernel
            plan[f"t{table}"].compute_kernel = case.of_table("kernels", table)
            if case.several_groups:
                plan[f"t{table}"].stochastic_rounding = table < case.num_tables // 2
    return plan


class Model(torch.nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, features):
        output = self.collection(features)
        if isinstance(output, LazyAwaitable):
            output = output.wait()
        if isinstance(output, dict):
            return {name: jagged.values() for name, jagged in output.items()}
        return output.to_dict()


def shard(case, sharder=None):
    """The sharded model, with the same weights on any number of ranks."""
    collection, sharder = make_collection(case), sharder or make_sharder(case)
    model = DistributedModelParallel(
        Model(collection),
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"collection": make_plan(case, collection, sharder)}),
        sharders=[sharder],
    )
    set_tables(model)
    return model


def shards_of(value):
    """[(offsets, local tensor)] of a tensor in a state_dict."""
    if isinstance(value, torch.distributed._shard.sharded_tensor.ShardedTensor):
        return [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    return [([0] * value.dim(), value)]


def set_tables(model):
    """Row r, column c of table t gets a number that depends on nothing else."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            generator = torch.Generator().manual_seed(int(name.split(".")[-2].removeprefix("t")))
            whole = torch.rand(tuple(value.shape), generator=generator) - 0.5
            for offsets, tensor in shards_of(value):
                part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))]
                tensor.copy_(part)


def make_features(case, step, rank=None):
    """The batch of this rank: bags of 0 to 4 ids, with rows that are there more than once."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch_sizes = [size + rank for size in case.batch_sizes] or [SAMPLES] * len(case.features)
    lengths = torch.randint(0, 5, (sum(batch_sizes),), generator=generator)
    ids = torch.randint(0, ROWS // 2, (int(lengths.sum()),), generator=generator)
    vbe = {}
    if case.batch_sizes:  # sample i of SAMPLES has, in each feature, one of the feature's bags
        bags = [torch.randint(0, size, (SAMPLES,), generator=generator) for size in batch_sizes]
        vbe = {
            "stride_per_key_per_rank": [[size] for size in batch_sizes],
            "inverse_indices": (case.features, torch.stack(bags)),
        }
    weights = torch.rand(len(ids), generator=generator) if case.weighted else None
    return torchrec.KeyedJaggedTensor(
        keys=case.features,
        values=ids.to(case.index_dtype),
        lengths=lengths.to(case.index_dtype),
        weights=weights,
        **vbe,
    )


def train_step(model, case, step):
    """-> the loss on this rank. Every element of the output has a coefficient of its own."""
    outputs = model(make_features(case, step))
    loss = 0.0
    for feature in sorted(outputs):
        values = outputs[feature].float()
        coefficients = torch.linspace(0.5, 1.5, max(values.numel(), 1))[: values.numel()].view_as(values)
        loss = loss + (coefficients * values.square()).sum()
    model.fused_optimizer.zero_grad()
    loss.backward()
    model.fused_optimizer.step()
    return loss.item()


def collect(state):
    """{name: the whole tensor} of a state_dict, on every rank."""
    mine = {name: [(o, t.detach().cpu().clone()) for o, t in shards_of(v)] for name, v in state.items()}
    all_shards = [None] * dist.get_world_size()
    dist.all_gather_object(all_shards, {name: (tuple(state[name].shape), parts) for name, parts in mine.items()})
    whole = {}
    for of_rank in all_shards:
        for name, (shape, parts) in of_rank.items():
            for offsets, tensor in parts:
                if name not in whole:
                    whole[name] = torch.full(shape, float("nan"), dtype=tensor.dtype)
                whole[name][tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))] = tensor
    return whole


def optimizer_state(model):
    """{parameter/state: tensor} of the fused optimizer."""
    state = model.fused_optimizer.state_dict()["state"]
    return {f"{parameter}/{name}": value for parameter, states in state.items() for name, value in states.items()}


def train(case):
    """-> {losses, weights, states, kernels, messages} after case.steps steps."""
    with logged() as messages, installed(fused=case.fused_everywhere):
        model = shard(case)
        outputs = model(make_features(case, step=0))
        losses = [train_step(model, case, step) for step in range(case.steps)]
        return {
            "losses": losses,
            "weights": collect(model.state_dict()),
            "states": collect(optimizer_state(model)),
            "state_keys": list(model.state_dict()),
            "kernels": [type(module).__module__.split(".")[0] for module in tbes(model)],
            "messages": messages,
            "output_dtypes": {values.dtype for values in outputs.values()},
        }


def tbes(model):
    """The TBEs of this rank, ours and FBGEMM's."""
    lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
    modules = [module for lookup in lookups for module in lookup.modules()]
    return [module for module in modules if type(module).__name__ == "SplitTableBatchedEmbeddingBagsCodegen"]
