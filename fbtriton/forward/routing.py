"""Which path of the forward and the backward each feature takes, and why. A pure function of shapes: no device sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fbtriton.config import select_gather, select_long_run, select_short_run, target_of, uses_kernels
from fbtriton.layout import OperatorSpec


@dataclass(frozen=True)
class Route:
    """One path and the features that take it."""

    path: str
    features: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        features = ", ".join(map(str, self.features))
        return f"{self.path}: features {features}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """The routes of one operator on one device."""

    routes: tuple[Route, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.routes))


def plan(spec: OperatorSpec, device: torch.device, mean_length: float = 20.0) -> Plan:
    """The plan of the operator for tensors on `device`.

    One generic path each way exists today: the gather, and runs routed by their length.
    """
    features = tuple(range(len(spec.feature_tables)))
    if not uses_kernels(device):
        return Plan((Route("reference", features, f"tensors on {device} run the PyTorch reference"),))
    target = target_of(device)
    routes = []
    for bucket in spec.layout.buckets:
        gather, source = select_gather(target.name, bucket.dim, spec.torch_weights_dtype.itemsize, mean_length)
        short = select_short_run(bucket.block_dim)
        long = select_long_run(bucket.block_dim)
        routes += [
            Route(
                "forward gather",
                bucket.features,
                f"dim {bucket.dim}; {gather.bags_per_program} bags a program, {gather.rows_per_bag} rows of each"
                f" side by side, {gather.num_warps} warps; {source}",
            ),
            Route(
                "backward short_run",
                bucket.features,
                f"runs below {long.threshold} entries; {short.runs_per_tile} runs a tile, {short.num_warps} warps",
            ),
            Route(
                "backward grad_accum + apply",
                bucket.features,
                f"runs from {long.threshold} entries on, in pieces of {long.piece_length}",
            ),
        ]
    return Plan(tuple(routes))
