"""Which path of the forward and the backward each feature takes, and why. A pure function of shapes: no device sync.

Tables, dtypes and hints are known when the operator is built; of a batch only the number of ids and of bags is known
on the host, so where hints are missing every feature is taken to have the mean number of ids in a bag.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fbtriton.config import (
    HistogramConfig,
    Target,
    select_fused,
    select_gather,
    select_histogram,
    select_long_run,
    select_short_run,
    target_of,
    uses_kernels,
)  # fmt: skip
from fbtriton.layout import Bucket, OperatorSpec

HISTOGRAM_DIMS = range(16, 257)


@functools.lru_cache(maxsize=256)
def gathered_features(spec: OperatorSpec, counted: tuple[int, ...]) -> tuple[tuple[Bucket, tuple[int, ...]], ...]:
    """For each dim the features that are not counted: one launch of the gather each."""
    left_out = set(counted)
    parts = [(bucket, tuple(f for f in bucket.features if f not in left_out)) for bucket in spec.layout.buckets]
    return tuple((bucket, features) for bucket, features in parts if features)


@functools.lru_cache(maxsize=256)
def counted_features(
    spec: OperatorSpec, counted: tuple[int, ...]
) -> tuple[tuple[Bucket, tuple[int, ...], tuple[int, ...]], ...]:
    """For each dim the features that are counted, and where each stands among all of those: one product each."""
    number = {feature: n for n, feature in enumerate(counted)}
    parts = [(bucket, tuple(f for f in bucket.features if f in number)) for bucket in spec.layout.buckets]
    return tuple((bucket, features, tuple(number[f] for f in features)) for bucket, features in parts if features)


def upload_routes(spec: OperatorSpec, device: torch.device) -> None:
    """Copy to the device what any route of later batches needs, so that no copy falls into a capture."""
    for long_bags in (False, True):
        counted = _histogram_features(spec, long_bags, False, select_histogram())
        for _, features in gathered_features(spec, counted):
            spec.layout.numbers_on_device(features, device)
        for _, features, numbers in counted_features(spec, counted):
            spec.layout.numbers_on_device(features, device)
            spec.layout.numbers_on_device(numbers, device)
        spec.layout.numbers_on_device(counted, device)


def bag_length(spec: OperatorSpec, features: tuple[int, ...], mean_length: float) -> float:
    """Expected ids in a bag of these features: from the hints, or the mean of the batch."""
    hints = spec.bag_size_hints
    return sum(hints[feature] for feature in features) / len(features) if hints else mean_length


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


def histogram_features(
    spec: OperatorSpec, mean_length: float, *, weighted: bool, vbe: bool
) -> tuple[tuple[int, ...], HistogramConfig]:
    """The features that are counted and multiplied, and how; the others are gathered."""
    config = select_histogram()
    return _histogram_features(spec, mean_length >= config.min_length, weighted or vbe, config), config


@functools.lru_cache(maxsize=256)
def _histogram_features(
    spec: OperatorSpec, long_bags: bool, excluded: bool, config: HistogramConfig
) -> tuple[int, ...]:
    if excluded:
        return ()
    chosen = []
    for feature, table in enumerate(spec.feature_tables):
        rows, dim = spec.tables[table]
        is_long = spec.bag_size_hints[feature] >= config.min_length if spec.bag_size_hints else long_bags
        if is_long and 1 <= rows <= config.max_rows and dim in HISTOGRAM_DIMS:
            chosen.append(feature)
    return tuple(chosen)


def plan(
    spec: OperatorSpec, device: torch.device, mean_length: float = 20.0, *, weighted: bool = False, vbe: bool = False
) -> Plan:
    """The plan of the operator for tensors on `device` and bags of mean_length ids."""
    if not uses_kernels(device):
        features = tuple(range(len(spec.feature_tables)))
        return Plan((Route("reference", features, f"tensors on {device} run the PyTorch reference"),))
    target = target_of(device)
    return plan_for_gpu(spec, target.name, mean_length, weighted=weighted, vbe=vbe, capability=target.capability)


def plan_for_gpu(
    spec: OperatorSpec, gpu: str, mean_length: float, *, weighted: bool = False, vbe: bool = False, capability: int = 0
) -> Plan:
    """The plan for a GPU by name, which need not be here. capability: of an NVIDIA GPU, 90 or 100; 0 = not known."""
    counted, histogram = histogram_features(spec, mean_length, weighted=weighted, vbe=vbe)
    itemsize = spec.torch_weights_dtype.itemsize
    routes = []
    if counted:
        reason = (
            f"at most {histogram.max_rows} rows of {HISTOGRAM_DIMS[0]} to {HISTOGRAM_DIMS[-1]} elements, unweighted,"
            f" bags of {histogram.min_length:g} ids or more"
        )
        routes.append(Route("forward histogram", counted, reason))
    for bucket, gathered in gathered_features(spec, counted):
        length = bag_length(spec, gathered, mean_length)
        gather, source = select_gather(gpu, bucket.dim, itemsize, length)
        reason = (
            f"dim {bucket.dim}; {gather.bags_per_program} bags a program, {gather.rows_per_bag} rows of each side"
            f" by side, {gather.num_warps} warps; {source}"
        )
        routes.append(Route("forward gather", gathered, reason))
    block_dims = tuple(bucket.block_dim for bucket in spec.layout.buckets)
    fused = select_fused(Target(gpu, 0, capability), block_dims, spec.deterministic)
    for bucket in spec.layout.buckets:
        short, long = select_short_run(bucket.dim), select_long_run(bucket.block_dim)
        reason = f"runs below {long.threshold} entries; {short.runs_per_tile} runs a tile, {short.num_warps} warps"
        routes.append(Route("backward short_run", bucket.features, reason))
        reason = f"runs from {long.threshold} entries on, in pieces of {long.piece_length}"
        if fused is not None:
            reason += f", {'added up by TMA in any order' if fused.reduce else 'in ordered slots'}"
        path = "backward grad_accum + apply" if fused is None else "backward fused long_run (TLX)"
        routes.append(Route(path, bucket.features, reason))
    return Plan(tuple(routes))
