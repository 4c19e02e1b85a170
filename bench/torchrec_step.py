"""A DLRM in TorchRec's engine with each kernel: the losses of 100 steps, and what a step costs.

    torchrun --standalone bench/torchrec_step.py --device cuda --json bench/results/nvidia-h200/torchrec.json

Both kernels start from the same weights and see the same batches (fp32, so without stochastic rounding). Then steps are
timed by the wall clock, in the order ABBA, and on a GPU profiled: the device time of whole steps, and of the embeddings
alone, forward and backward with a given gradient. It prints tables in Markdown, and fails (exit code 1) unless the
losses agree to a relative 1e-5 at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torchrec_integration
from bench import device_time, results

KERNELS = ("fused_triton", "fused")
LOSS_BOUND = 1e-5  # relative
OPTIMIZERS = {"sgd": ("EXACT_SGD", 1.0), "rowwise_adagrad": ("EXACT_ROWWISE_ADAGRAD", 0.01)}
DENSE_FEATURES, DENSE_LR = 13, 0.01
BATCHES = 8  # different ones, used in turn
REPETITIONS = 20


class Batch(NamedTuple):
    dense: Tensor  # [B, DENSE_FEATURES]
    sparse: Any  # KeyedJaggedTensor
    labels: Tensor  # [B]


class Dlrm(nn.Module):
    """Bottom MLP, pooled embeddings, pairwise dot products, top MLP."""

    def __init__(self, tables: list[Any], dim: int, device: torch.device) -> None:
        super().__init__()
        self.embeddings = torchrec.EmbeddingBagCollection(tables, device=torch.device("meta"))
        # Not ReLU: where its input is almost 0, a difference in the last bit switches a gradient on or off.
        self.bottom = nn.Sequential(
            nn.Linear(DENSE_FEATURES, 512), nn.SiLU(), nn.Linear(512, 256), nn.SiLU(), nn.Linear(256, dim), nn.SiLU()
        ).to(device)
        vectors = len(tables) + 1
        self.pairs = torch.triu_indices(vectors, vectors, offset=1, device=device)
        self.top = nn.Sequential(
            nn.Linear(dim + self.pairs.shape[1], 1024), nn.SiLU(), nn.Linear(1024, 512), nn.SiLU(), nn.Linear(512, 1)
        ).to(device)

    def forward(self, batch: Batch) -> Tensor:
        dense = self.bottom(batch.dense)
        pooled = self.embeddings(batch.sparse).values().view(len(dense), -1, dense.shape[1])
        rows = torch.cat([dense[:, None], pooled], dim=1)
        dots = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], dim=1)).squeeze(1)


class Trainer:
    """The model with one kernel, and what is done with it."""

    def __init__(self, kernel: str, optimizer: str, device: torch.device, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        names = [f"t{table}" for table in range(args.tables)]
        tables = [
            torchrec.EmbeddingBagConfig(
                num_embeddings=args.rows, embedding_dim=args.dim, name=name, feature_names=[name],
                weight_init_min=-0.05, weight_init_max=0.05,
            )
            for name in names
        ]  # fmt: skip
        kind, learning_rate = OPTIMIZERS[optimizer]
        index_dtype = getattr(torch, args.ids)
        sharder = torchrec_integration.TritonEmbeddingBagCollectionSharder(
            {
                "optimizer": EmbOptimType[kind],
                "learning_rate": learning_rate,
                "embedding_table_index_type": index_dtype,
                "embedding_table_offset_type": index_dtype,
            }
        )
        model = Dlrm(tables, args.dim, device)
        world_size = dist.get_world_size()
        shardings = {
            name: table_wise(rank=number % world_size, compute_kernel=kernel) for number, name in enumerate(names)
        }
        plan = construct_module_sharding_plan(model.embeddings, shardings, sharder, device_type=device.type)
        self.model = DistributedModelParallel(
            model, device=device, plan=ShardingPlan({"embeddings": plan}), sharders=[sharder]
        )
        self.dense = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=DENSE_LR)

    def step(self, batch: Batch) -> Tensor:
        loss = binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        self.dense.zero_grad()
        self.model.fused_optimizer.zero_grad()
        loss.backward()
        self.model.fused_optimizer.step()
        self.dense.step()
        return loss.detach()

    def embeddings_step(self, batch: Batch, gradient: Tensor) -> None:
        embeddings = self.model.module.embeddings
        embeddings(batch.sparse).wait().values().backward(gradient)


def make_batches(device: torch.device, args: argparse.Namespace) -> list[Batch]:
    """Bags of 1 to 2 * args.bag - 1 ids; ids crowd at the first rows, as popular items do."""
    generator = torch.Generator(device).manual_seed(args.seed + dist.get_rank())
    on: dict[str, Any] = {"generator": generator, "device": device}
    names, batches = [f"t{table}" for table in range(args.tables)], []
    for _ in range(BATCHES):
        lengths = torch.randint(1, 2 * args.bag, (args.tables * args.batch_size,), **on)
        share = torch.rand(int(lengths.sum()), dtype=torch.float64, **on) ** args.skew
        ids = (share * args.rows).long().clamp_max(args.rows - 1)
        dtype = getattr(torch, args.ids)
        sparse = torchrec.KeyedJaggedTensor(keys=names, values=ids.to(dtype), lengths=lengths.to(dtype))
        dense = torch.rand(args.batch_size, DENSE_FEATURES, **on)
        labels = torch.randint(0, 2, (args.batch_size,), **on).float()
        batches.append(Batch(dense, sparse, labels))
    return batches


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed_steps(trainer: Trainer, batches: list[Batch], device: torch.device) -> list[float]:
    """Milliseconds of each of REPETITIONS steps, by the wall clock, with the device waited for."""
    times = []
    for number in range(REPETITIONS):
        wait(device)
        start = time.perf_counter()
        trainer.step(batches[number % BATCHES])
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def device_times(trainer: Trainer, batches: list[Batch]) -> dict[str, Any]:
    """Median device time, in ms, of a step and of the embeddings alone; and the embeddings' kernels."""
    columns = trainer.model.module.embeddings(batches[0].sparse).wait().values().shape
    gradient = torch.full(columns, 1e-3, device="cuda")
    calls = []
    for batch in batches:
        calls += [lambda b=batch: trainer.step(b), lambda b=batch: trainer.embeddings_step(b, gradient)]
    flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    events = device_time.profile_calls(calls, flushed.zero_)
    step, embeddings = (device_time.summarise(events[first::2]) for first in (0, 1))
    step_ms, embeddings_ms = (statistics.median(profile.totals) / 1e3 for profile in (step, embeddings))
    return {"step_ms": step_ms, "embeddings_ms": embeddings_ms, "kernels": embeddings.kernels}


def compare(optimizer: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    batches = make_batches(device, args)
    trainers = {kernel: Trainer(kernel, optimizer, device, args) for kernel in KERNELS}
    found: dict[str, Any] = {kernel: {} for kernel in KERNELS}
    for kernel, trainer in trainers.items():
        losses = [trainer.step(batches[step % BATCHES]) for step in range(args.steps)]
        found[kernel]["losses"] = torch.stack(losses).tolist()
    pairs = zip(*(found[kernel]["losses"] for kernel in KERNELS), strict=True)
    found["largest_relative_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    walls: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for kernel in (*KERNELS, *reversed(KERNELS)):
        walls[kernel] += timed_steps(trainers[kernel], batches, device)
    for kernel, trainer in trainers.items():
        found[kernel]["wall_ms"] = statistics.median(walls[kernel])
        found[kernel]["device"] = device_times(trainer, batches) if device.type == "cuda" else None
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| optimizer | kernel | step, wall ms | step, device ms | embeddings, device ms | their share | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for optimizer, of_optimizer in found.items():
        for kernel in KERNELS:
            numbers, device = of_optimizer[kernel], of_optimizer[kernel]["device"]
            cells = ["-", "-", "-"]
            if device is not None:
                share = device["embeddings_ms"] / device["step_ms"]
                cells = [f"{device['step_ms']:.3f}", f"{device['embeddings_ms']:.3f}", f"{share:.0%}"]
            difference = f"{of_optimizer['largest_relative_difference']:.1e}"
            cells = [optimizer, kernel, f"{numbers['wall_ms']:.3f}", *cells, difference]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            f"# A DLRM in TorchRec's engine on {result['ranks']} x {result['machine']['name']}",
            "",
            f"- command: `{result['command']}`",
            f"- date: {result['date']}; commit {result['commit']}",
            f"- versions: {versions}",
            "",
            "Both kernels from the same weights on the same batches. difference: the largest relative difference of the"
            f" two losses of a step, over {len(next(iter(result['results'].values()))['fused']['losses'])} steps. The"
            " embeddings' device time is that of a forward and a backward alone, with a cold L2.",
            "",
            table(result["results"]),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="A DLRM in TorchRec's engine with each kernel.")
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--steps", type=int, default=100, help="whose losses are compared")
    add("--batch-size", type=int, default=4096, help="of each rank")
    add("--tables", type=int, default=26)
    add("--rows", type=int, default=200_000, help="of each table")
    add("--dim", type=int, default=128)
    add("--bag", type=int, default=10, help="mean number of ids in a bag")
    add("--skew", type=float, default=3.0, help="1 = all rows alike; larger = the first rows more often")
    add("--ids", choices=["int32", "int64"], default="int64")
    add("--optimizer", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="where the result goes; beside it a page in Markdown")
    add("--commit", help="shown in the result, where there is no .git")
    args = parser.parse_args()
    torchrec_integration.install()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    found = {optimizer: compare(optimizer, device, args) for optimizer in args.optimizer}
    agree = all(of_optimizer["largest_relative_difference"] <= LOSS_BOUND for of_optimizer in found.values())
    if dist.get_rank() == 0:
        print(table(found))
        if args.json:
            without_folder = [Path(a).name if a == args.json else a for a in sys.argv[1:]]
            result = {
                "command": " ".join(["torchrun --standalone bench/torchrec_step.py", *without_folder]),
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "commit": args.commit,
                "machine": results.machine(),
                "versions": results.versions() | {"torchrec": torchrec.__version__},
                "ranks": dist.get_world_size(),
                "results": found,
            }
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
            Path(args.json).with_suffix(".md").write_text(page(result))
        if not agree:
            print(f"FAILED: the losses must agree to a relative {LOSS_BOUND:g}", file=sys.stderr)
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
