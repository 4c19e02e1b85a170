"""MovieLens-100K with TorchRec: a DLRM whose tables DistributedModelParallel shards, with the compute kernel as option.

The same data and model as movielens.py, trained the way one outgrows a GPU: TorchRec's planner places the tables on the
ranks, its pipelines exchange ids and pooled rows, and the kernel of each table is FUSED (FBGEMM) or FUSED_TRITON
(fbtriton, once `torchrec_integration.install` was called). Optimizer steps of the rows happen in the backward.

    python examples/torchrec_dlrm.py                                  # two processes on the CPU, through gloo
    python examples/torchrec_dlrm.py --kernel both                    # both kernels; fails if their losses differ
    torchrun --standalone --nproc-per-node 2 examples/torchrec_dlrm.py --device cuda     # two GPUs, through NCCL
    python examples/torchrec_dlrm.py --sharding mixed --optimizer sgd --pooling mean     # other plans and models
    python examples/torchrec_dlrm.py --checkpoint DIR --save-every 100                   # writes DIR/step-100, ...
    python examples/torchrec_dlrm.py --checkpoint DIR --resume --kernel fused            # goes on, with either kernel

Where torchrun restarts it (--max-restarts) after a rank was lost, it goes on from the last checkpoint by itself.

It writes torchrec_dlrm.png and torchrec_dlrm.json to --out and prints a table. With --kernel both it fails (exit
code 1) unless the two training losses differ by at most 1e-4 at every step. The terms of the data are in movielens.py.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import movielens_data
import movielens_plot
import numpy as np
import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from movielens_data import FEATURE_TABLE_MAP, FEATURES, Data
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

import torchrec_integration

LOSS_BOUND = 1e-4
AUC_MARGIN = 0.02
DIM = 16
DENSE_LR = 0.02
OPTIMIZERS = {"rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 0.02), "sgd": (EmbOptimType.EXACT_SGD, 1.0)}
SHARDINGS = ["table_wise", "row_wise", "column_wise"]
# Of a column shard, on any number of ranks: row-wise Adagrad has a state for each row of each column shard, so that a
# checkpoint can only be loaded where tables are cut into as many.
SHARD_COLUMNS = DIM // 2
EVALS_PER_EPOCH = 4
COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # a rank that waits longer for the others fails
INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}


class Dlrm(nn.Module):
    """The pooled embeddings and their pairwise dot products, into an MLP."""

    def __init__(self, tables: list[torchrec.EmbeddingBagConfig], weighted: bool, device: torch.device):
        super().__init__()
        # On "meta" nothing is allocated: each rank makes the shards that the plan gives it.
        self.embeddings = torchrec.EmbeddingBagCollection(tables, is_weighted=weighted, device=torch.device("meta"))
        inputs = len(FEATURES) * DIM + len(FEATURES) * (len(FEATURES) - 1) // 2
        self.mlp = nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 1)).to(device)
        self.pairs = torch.triu_indices(len(FEATURES), len(FEATURES), offset=1, device=device)

    def forward(self, features: torchrec.KeyedJaggedTensor) -> Tensor:
        pooled = self.embeddings(features).to_dict()
        rows = torch.stack([pooled[feature] for feature in FEATURES], dim=1)  # [B, F, DIM]
        dots = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]  # [B, F * (F - 1) / 2]
        return self.mlp(torch.cat([rows.flatten(1), dots], dim=1)).squeeze(1)


class Sharder(torchrec_integration.TritonEmbeddingBagCollectionSharder):
    """Offers row-wise sharding on CPUs too, where it works; TorchRec's planner knows it on GPUs only."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types = super().sharding_types(compute_device_type)
        return types if "row_wise" in types else [*types, "row_wise"]


def make_tables(data: Data, args: argparse.Namespace) -> list[torchrec.EmbeddingBagConfig]:
    return [
        torchrec.EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=[FEATURES[f] for f, table in enumerate(FEATURE_TABLE_MAP) if table == number],
            weight_init_min=-0.05,
            weight_init_max=0.05,
            pooling=torchrec.PoolingType.MEAN if args.pooling == "mean" else torchrec.PoolingType.SUM,
        )
        for number, (name, rows) in enumerate(data.table_rows.items())
    ]


def make_constraints(
    kernel: str, tables: list[torchrec.EmbeddingBagConfig], args: argparse.Namespace
) -> dict[str, Any]:
    """The planner takes `kernel` for all tables. A plan is "mixed" if the tables in turn may have one type each; those
    that do not have a row for every rank are not sharded row-wise then, as FBGEMM on CPUs refuses some of these."""
    ranks = dist.get_world_size()
    constraints: dict[str, Any] = {}
    for number, table in enumerate(tables):
        types = args.sharding
        if types == ["mixed"]:
            rows_a_rank = -(-table.num_embeddings // ranks)
            turn = SHARDINGS[number % len(SHARDINGS)]
            full = rows_a_rank * (ranks - 1) < table.num_embeddings
            types = ["table_wise" if turn == "row_wise" and not full else turn]
        constraints |= torchrec_integration.constraints_for(
            [table], kernel, sharding_types=types, min_partition=SHARD_COLUMNS
        )
    return constraints


def shard(kernel: str, data: Data, device: torch.device, args: argparse.Namespace) -> DistributedModelParallel:
    """The model with its tables on the ranks."""
    tables = make_tables(data, args)
    model = Dlrm(tables, args.pooling == "weighted", device)
    index_dtype = INDEX_DTYPES[args.index_dtype]
    optimizer, learning_rate = OPTIMIZERS[args.optimizer]
    sharder = Sharder(
        fused_params={
            "optimizer": optimizer,
            "learning_rate": learning_rate,
            "embedding_table_index_type": index_dtype,
            "embedding_table_offset_type": index_dtype,
        }
    )
    constraints = make_constraints(kernel, tables, args)
    topology = Topology(
        world_size=dist.get_world_size(),
        compute_device=device.type,
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    group = dist.GroupMember.WORLD
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).collective_plan(model, [sharder], group)
    if dist.get_rank() == 0 and args.verbose:
        print(plan)
    env = ShardingEnv.from_process_group(group)
    # DDP otherwise lays gradients out anew after its first step. From three ranks on it then sums in another order, and
    # a run that is resumed would differ in the last bits.
    replicated = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    return DistributedModelParallel(
        model, env=env, device=device, plan=plan, sharders=[sharder], data_parallel_wrapper=replicated
    )


def make_optimizer(model: DistributedModelParallel) -> CombinedOptimizer:
    """That of the rows, whose steps are in the backward, and one for all other parameters."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    others = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=DENSE_LR))
    return CombinedOptimizer([model.fused_optimizer, others])


def make_batch(
    data: Data, samples: np.ndarray, device: torch.device, args: argparse.Namespace
) -> tuple[torchrec.KeyedJaggedTensor, Tensor]:
    """Features and labels of this rank's part of the samples."""
    mine = samples[dist.get_rank() :: dist.get_world_size()]
    batch = movielens_data.make_batch(data, mine, str(device), INDEX_DTYPES[args.index_dtype])
    weights = batch.weights if args.pooling == "weighted" else None
    features = torchrec.KeyedJaggedTensor(
        keys=FEATURES, values=batch.indices, weights=weights, lengths=batch.offsets.diff()
    )
    return features, batch.labels


@dataclass
class Run:
    """What one training run left behind."""

    losses: list[float] = field(default_factory=list)  # every step, of the whole batch
    eval_steps: list[int] = field(default_factory=list)
    test_losses: list[float] = field(default_factory=list)
    test_aucs: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of this process's training steps, with making their batches
    resumed_after: list[int] = field(default_factory=list)  # steps after which a checkpoint was gone on from
    plan: dict[str, str] = field(default_factory=dict)  # how each table is sharded, and on which ranks
    digest: str = ""  # of all that is trained and the optimizers' states, bit by bit, on this number of ranks


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, device: torch.device, args: argparse.Namespace) -> tuple[float, float]:
    """Loss and AUC of the test part, on every rank."""
    logits, labels = [], []
    for samples in np.array_split(np.arange(data.num_train, len(data.labels)), 5):
        features, part = make_batch(data, samples, device, args)
        logits.append(model(features).cpu())
        labels.append(part.cpu())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (torch.cat(logits), torch.cat(labels)))
    all_logits, all_labels = (torch.cat(parts) for parts in zip(*gathered, strict=True))
    loss = binary_cross_entropy_with_logits(all_logits, all_labels)
    return float(loss), float(roc_auc_score(all_labels, all_logits)) if loss.isfinite() else float("nan")


def mean_over_ranks(losses: list[Tensor], device: torch.device) -> list[float]:
    """Of each step. Added rank by rank: the order of an all-reduce depends on how many steps there are."""
    stacked = torch.stack(losses) if losses else torch.zeros(0, device=device)
    of_ranks = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, stacked)
    return (sum(of_ranks[1:], of_ranks[0]) / dist.get_world_size()).tolist()


def train(kernel: str, data: Data, device: torch.device, args: argparse.Namespace) -> Run:
    torch.manual_seed(args.seed)
    model = shard(kernel, data, device, args)
    optimizer = make_optimizer(model)
    steps = movielens_data.shuffled_steps(data, args.epochs, args.batch_size, args.seed)[: args.steps]
    between = args.eval_every or max(1, data.num_train // args.batch_size // EVALS_PER_EPOCH)
    run, losses = Run(), []
    done = load_checkpoint(model, optimizer, run, args) if resumes(args) else 0
    (plan,) = model.plan.plan.values()
    run.plan = {name: f"{shards.sharding_type} on {shards.ranks}" for name, shards in plan.items()}
    start = time.perf_counter()
    bar = tqdm(
        total=len(steps), initial=done, desc=f"{kernel:13}", mininterval=0.5, disable=args.quiet or dist.get_rank() != 0
    )
    for step, samples in enumerate(steps[done:], done + 1):
        features, labels = make_batch(data, samples, device, args)
        loss = binary_cross_entropy_with_logits(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        bar.update()
        saves = args.checkpoint and args.save_every and step % args.save_every == 0
        if step % between == 0 or step == len(steps) or saves:
            run.losses += mean_over_ranks(losses, device)
            losses = []
        if step % between == 0 or step == len(steps):
            run.seconds += time.perf_counter() - start
            test_loss, auc = evaluate(model, data, device, args)
            run.eval_steps.append(step)
            run.test_losses.append(test_loss)
            run.test_aucs.append(auc)
            bar.set_postfix(loss=f"{np.mean(run.losses[-between:]):.4f}", test_auc=f"{auc:.4f}")
            start = time.perf_counter()
        if saves:
            save_checkpoint(model, optimizer, run, step, args)
    bar.close()
    run.digest = digest(checkpoint_state(model, optimizer))
    return run


def resumes(args: argparse.Namespace) -> bool:
    """Whether to go on from a checkpoint: if told to, or if torchrun has started this process anew and there is one."""
    return args.resume or bool(restarts() and args.checkpoint and complete_checkpoints(args))


def restarts() -> int:
    """How often torchrun has started the ranks anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def digest(state: Any) -> str:
    """A hash of every bit of a state that is spread over the ranks."""
    mine = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{name}/{key}", value[key])
        elif hasattr(value, "local_shards"):
            for part in value.local_shards():
                add(f"{name}{part.metadata.shard_offsets}", part.tensor)
        elif isinstance(value, Tensor):
            mine.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        else:
            mine.update(f"{name}={value}".encode())

    add("", state)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine.hexdigest())
    return hashlib.sha256("".join(of_ranks).encode()).hexdigest()[:16]


def checkpoint_state(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """Tables, optimizer state of their rows, and all else that is trained. Each rank writes the shards it has."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_checkpoint(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, run: Run, step: int, args: argparse.Namespace
) -> None:
    folder = Path(args.checkpoint) / f"step-{step}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(vars(run)))
    checkpoint.save(checkpoint_state(model, optimizer), checkpoint_id=str(folder))


def complete_checkpoints(args: argparse.Namespace) -> list[Path]:
    """Oldest first. The last thing that saving writes is .metadata."""
    complete = [path.parent for path in Path(args.checkpoint).glob("step-*/.metadata")]
    return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(
    model: DistributedModelParallel, optimizer: CombinedOptimizer, run: Run, args: argparse.Namespace
) -> int:
    """Load the last complete checkpoint in place -> its step. It may have other shards and kernels than the model."""
    complete = complete_checkpoints(args)
    if not complete:
        raise SystemExit(f"--resume: {args.checkpoint} has no checkpoint")
    folder = complete[-1]
    state = checkpoint_state(model, optimizer)
    checkpoint.load(state, checkpoint_id=str(folder))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    vars(run).update(json.loads((folder / "run.json").read_text()))
    run.resumed_after.append(int(folder.name.removeprefix("step-")))
    return run.resumed_after[-1]


def report(runs: dict[str, Run], data: Data, device: torch.device, args: argparse.Namespace) -> bool:
    """Table, plot and figures -> whether the losses of two kernels agree."""
    from rich.console import Console
    from rich.table import Table as RichTable

    out, baseline = Path(args.out), movielens_data.item_mean_auc(data)
    out.mkdir(parents=True, exist_ok=True)
    last = len(next(iter(runs.values())).losses) // 10 or 1
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    table = RichTable(title=f"MovieLens-100K, TorchRec {torchrec.__version__}, {dist.get_world_size()} x {where}")
    for column in ("", *runs):
        table.add_column(column)
    table.add_row("steps", *(str(len(run.losses)) for run in runs.values()))
    table.add_row(f"training loss, last {last}", *(f"{np.mean(run.losses[-last:]):.5f}" for run in runs.values()))
    table.add_row("test loss", *(f"{run.test_losses[-1]:.5f}" for run in runs.values()))
    table.add_row(f"test AUC (item mean: {baseline:.4f})", *(f"{run.test_aucs[-1]:.4f}" for run in runs.values()))
    table.add_row("training seconds", *(f"{run.seconds:.1f}" for run in runs.values()))
    figures: dict[str, Any] = {
        "torchrec": torchrec.__version__, "torch": torch.__version__, "device": where, "ranks": dist.get_world_size(),
        "arguments": vars(args), "baseline_auc": baseline, "runs": {kernel: vars(run) for kernel, run in runs.items()},
    }  # fmt: skip
    difference, agree = None, True
    if len(runs) == 2:
        ours, theirs = (np.array(run.losses) for run in runs.values())
        difference = np.abs(ours - theirs)
        agree = bool(difference.max() <= LOSS_BOUND)
        table.add_row(
            f"largest loss difference, <= {LOSS_BOUND:g}", f"{difference.max():.1e}", "ok" if agree else "FAILED"
        )
        figures["largest_loss_difference"] = float(difference.max())
    movielens_plot.plot_runs(runs, difference, baseline, out / "torchrec_dlrm.png", LOSS_BOUND, AUC_MARGIN)
    (out / "torchrec_dlrm.json").write_text(json.dumps(figures) + "\n")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    print(f"plot and figures are in {out}")
    return agree


def run_rank(args: argparse.Namespace) -> int:
    """One process of the group that the environment describes, as torchrun sets it -> exit code."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # more gain little at these sizes, and lose much where the cores are shared
    torchrec_integration.install()
    backend = "nccl" if args.device == "cuda" else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(dist.rendezvous(args.rendezvous, rank, size))
    store = dist.PrefixStore(f"start-{restarts()}", store)  # torchrun's still has what ranks wrote before a restart
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    if args.batch_size % dist.get_world_size():
        raise SystemExit(f"--batch-size must be a multiple of {dist.get_world_size()} ranks, got {args.batch_size}")
    data = movielens_data.load(args.data)
    kernels = ["fused_triton", "fused"] if args.kernel == "both" else [args.kernel]
    runs = {kernel: train(kernel, data, device, args) for kernel in kernels}
    agree = report(runs, data, device, args) if dist.get_rank() == 0 else True
    dist.barrier()
    dist.destroy_process_group()
    return 0 if agree else 1


def run_spawned(local_rank: int, args: argparse.Namespace) -> None:
    """A process that this script has started itself."""
    rank, size = str(local_rank), str(args.processes)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    sys.exit(run_rank(args))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kernel", choices=["fused", "fused_triton", "both"], default="fused_triton")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--processes", type=int, default=2, help="ranks to start, where torchrun has not started this script")
    add("--sharding", nargs="+", metavar="TYPE", default=SHARDINGS,
        help="what the planner may choose from; mixed = another type for each table in turn")  # fmt: skip
    add("--optimizer", choices=list(OPTIMIZERS), default="rowwise_adagrad", help="of the rows")
    add("--pooling", choices=["weighted", "sum", "mean"], default="weighted", help="weighted = by rating, and a mean")
    add("--data", metavar="DIR", help="original or packaged files of MovieLens-100K")
    add("--out", metavar="DIR", default="demo_output", help="where the plot and the figures go")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=512, help="of all ranks together")
    add("--steps", type=int, help="stop after as many")
    add("--index-dtype", choices=list(INDEX_DTYPES), default="int64")
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, metavar="N", help="steps between two evaluations; default: a quarter of an epoch")
    add("--checkpoint", metavar="DIR", help="where checkpoints are, a folder for each")
    add("--save-every", type=int, metavar="N", help="steps between two checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--verbose", action="store_true", help="print the plan")
    add("--quiet", action="store_true", help="without a progress bar")
    args = parser.parse_args(arguments)
    if (args.resume or args.save_every) and not args.checkpoint:
        parser.error("--resume and --save-every need --checkpoint DIR")
    if args.checkpoint and args.kernel == "both":
        parser.error("--checkpoint needs one kernel, not both")
    return args


def main() -> int:
    args = parse_args()
    if "RANK" in os.environ:
        args.rendezvous = "env://"
        return run_rank(args)
    with tempfile.TemporaryDirectory() as folder:
        args.rendezvous = f"file://{folder}/rendezvous"
        context = torch.multiprocessing.spawn(run_spawned, (args,), nprocs=args.processes, join=False)
        try:
            while not context.join():
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            return error.exit_code or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
