"""What torchrec_gpus.py trains: combinations of settings, and chains of checkpoints."""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

PLANS = ("table_wise", "row_wise", "column_wise", "mixed")
OPTIMIZERS = ("sgd", "rowwise_adagrad")
POOLINGS = ("sum", "mean", "weighted")
IDS = ("int32", "int64")
BATCH = 512  # of all ranks of the example; less where that is no multiple of them


class Case(NamedTuple):
    plan: str
    optimizer: str
    pooling: str
    ids: str


RESUMED = Case("mixed", "rowwise_adagrad", "weighted", "int64")  # what is saved and loaded


class Link(NamedTuple):
    """A part of a training run, from one checkpoint to the next."""

    several: bool  # ranks, or one
    kernel: str


ONE, MANY = False, True
CHAINS: dict[str, tuple[Link, ...]] = {
    "nothing changes": (Link(MANY, "fused_triton"),) * 3,
    "ranks: 1, {n}, 1": (Link(ONE, "fused_triton"), Link(MANY, "fused_triton"), Link(ONE, "fused_triton")),
    "kernel: FUSED, FUSED_TRITON, FUSED": (Link(MANY, "fused"), Link(MANY, "fused_triton"), Link(MANY, "fused")),
    "both: FUSED on 1, FUSED_TRITON on {n}, FUSED on 1": (
        Link(ONE, "fused"), Link(MANY, "fused_triton"), Link(ONE, "fused"),
    ),
}  # fmt: skip


def all_cases() -> list[Case]:
    """Every plan with every optimizer and pooling. The first half has every pair of two settings, of ids too."""
    first, second = [], []
    for (q, pooling), (p, plan) in itertools.product(enumerate(POOLINGS), enumerate(PLANS)):
        optimizer, ids = (p + q) % 2, (p // 2 + q) % 2
        first.append(Case(plan, OPTIMIZERS[optimizer], pooling, IDS[ids]))
        second.append(Case(plan, OPTIMIZERS[1 - optimizer], pooling, IDS[1 - ids]))
    return first + second


def example_arguments(args: argparse.Namespace, kernel: str, case: Case, steps: int, *more: str) -> list[str]:
    """Of examples/torchrec_dlrm.py. It evaluates at the end only."""
    arguments = [
        "--device", args.device, "--kernel", kernel, "--steps", str(steps), "--eval-every", str(steps),
        "--sharding", case.plan, "--optimizer", case.optimizer, "--pooling", case.pooling, "--index-dtype", case.ids,
        "--batch-size", str(BATCH - BATCH % args.gpus), "--quiet",
    ]  # fmt: skip
    return [*arguments, *(["--data", args.data] if args.data else []), *more]
