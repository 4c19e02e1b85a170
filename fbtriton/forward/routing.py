"""Which path of the forward and the backward each feature takes, and why. A pure function of shapes: no device sync.

Tables, dtypes and hints are known when the operator is built; of a batch only the number of ids and of bags is known
on the host, so where hints are missing every feature is taken to have the mean number of ids in a bag.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fbtriton.batch import BatchShape
from fbtriton.config import (
    HistogramConfig,
    Target,
    backend,
    select_fused,
    select_gather,
    select_histogram,
    select_long_run,
    select_short_run,
    target_of,
    uses_kernels,
)  # fmt: skip
from fbtriton.layout import Bucket
from fbtriton.spec import OperatorSpec

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


@dataclass(frozen=True)
class CountedTables:
    """Tables of one dim that the backward updates by counts."""

    bucket: Bucket
    features: tuple[int, ...]  # those of one table side by side
    numbers: tuple[int, ...]  # where each feature stands among the counted ones
    first_numbers: tuple[int, ...]  # table t has the features first_numbers[t] to first_numbers[t + 1] - 1
    state_bases: tuple[int, ...]  # of each table
    max_rows: int


@functools.lru_cache(maxsize=256)
def counted_tables(spec: OperatorSpec, counted: tuple[int, ...]) -> tuple[CountedTables, ...]:
    """Those that are trained, and whose features are all counted."""
    layout, found = spec.layout, []
    left_out = {table for f, table in enumerate(spec.feature_tables) if f not in counted} | set(spec.frozen_tables)
    if spec.optimizer == "none":
        return ()
    for bucket, features, numbers in counted_features(spec, counted):
        kept = [(spec.feature_tables[f], f, n) for f, n in zip(features, numbers, strict=True)]
        kept = sorted(entry for entry in kept if entry[0] not in left_out)
        if kept:
            of_feature = [table for table, _, _ in kept]
            tables = sorted(set(of_feature))
            found.append(
                CountedTables(
                    bucket=bucket,
                    features=tuple(f for _, f, _ in kept),
                    numbers=tuple(n for _, _, n in kept),
                    first_numbers=(*map(of_feature.index, tables), len(kept)),
                    state_bases=tuple(layout.state_bases[table] for table in tables),
                    max_rows=max(layout.rows[table] for table in tables),
                )
            )
    return tuple(found)


def upload_routes(spec: OperatorSpec, device: torch.device) -> None:
    """Copy to the device what any route of later batches needs, so that no copy falls into a capture."""
    layout = spec.layout
    for least_rows in (None, *(1 << n for n in range(MAX_ROWS_BITS))):
        config = select_histogram()
        counted = _histogram_features(spec, least_rows, config) if _can_count(spec, config) else ()
        lists = [features for _, features in gathered_features(spec, counted)]
        lists += [numbers for _, *both in counted_features(spec, counted) for numbers in both]
        tables = counted_tables(spec, counted)
        lists += [numbers for t in tables for numbers in (t.features, t.numbers, t.first_numbers, t.state_bases)]
        for numbers in (counted, *lists):
            layout.numbers_on_device(numbers, device)
        layout.sorted_features(tuple(f for t in tables for f in t.features), device)


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
    if weighted or vbe or not _can_count(spec, config):
        return (), config
    # With hints the length of this batch is not asked for, so that a compiled graph does not depend on it.
    least_rows = None if spec.bag_size_hints else _least_rows(mean_length, config)
    return _histogram_features(spec, least_rows, config), config


def _can_count(spec: OperatorSpec, config: HistogramConfig) -> bool:
    """Whether bags of some length would make the route count. Products in tf32 are for NVIDIA."""
    if not spec.pooled or backend.get() != "cuda":
        return False
    return _has_small_table(spec, config)


@functools.lru_cache(maxsize=256)
def _has_small_table(spec: OperatorSpec, config: HistogramConfig) -> bool:
    return any(rows <= config.max_rows and dim in HISTOGRAM_DIMS for rows, dim in spec.tables)


MAX_ROWS_BITS = 16  # so many numbers of rows, each a power of two, are told apart
SHORT_OF_OVERFLOW = 128.0  # ids in a bag; few bags of this mean length have 255


def _least_rows(mean_length: float, config: HistogramConfig) -> int | None:
    """Rows from which a table is large enough to be counted, a power of two; None = the bags are too short."""
    if mean_length < config.min_length:
        return None
    if mean_length <= SHORT_OF_OVERFLOW:
        return 1
    for bits in range(MAX_ROWS_BITS - 1):  # comparisons alone, because the length may be symbolic
        if mean_length <= config.max_repeats * (1 << bits) or 1 << bits > config.max_rows:
            return 1 << bits
    return 1 << (MAX_ROWS_BITS - 1)


def count_bins(spec: OperatorSpec, counted: tuple[int, ...]) -> int:
    """Counts of each bag: as many as the largest table has rows, rounded up to a power of two, at least 16."""
    return max(16, 1 << (max(spec.tables[spec.feature_tables[f]][0] for f in counted) - 1).bit_length())


def kept_counts(spec: OperatorSpec, num_entries: int, shape: BatchShape, *, weighted: bool, vbe: bool) -> list[int]:
    """The shape of the counts that the forward keeps for the backward; [0] if it keeps none."""
    if weighted or vbe or not _can_count(spec, select_histogram()) or shape.num_bags == 0:
        return [0]
    counted, _ = histogram_features(spec, num_entries / shape.num_bags, weighted=weighted, vbe=vbe)
    if not counted_tables(spec, counted):
        return [0]
    return [len(counted), shape.batch_size, count_bins(spec, counted)]


@functools.lru_cache(maxsize=256)
def _histogram_features(spec: OperatorSpec, least_rows: int | None, config: HistogramConfig) -> tuple[int, ...]:
    """least_rows of features without a hint."""
    chosen = []
    for feature, table in enumerate(spec.feature_tables):
        rows, dim = spec.tables[table]
        least = _least_rows(spec.bag_size_hints[feature], config) if spec.bag_size_hints else least_rows
        if least is not None and least <= rows <= config.max_rows and dim in HISTOGRAM_DIMS:
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
    by_counts = tuple(f for part in counted_tables(spec, counted) for f in part.features)
    if by_counts:
        routes.append(Route("backward histogram", tuple(sorted(by_counts)), "counted by the forward; no sort"))
    fused = select_fused(Target(gpu, 0, capability), spec.layout.block_dims, spec.deterministic)
    for bucket in spec.layout.buckets:
        if set(bucket.features) <= set(by_counts):
            continue
        by_runs = tuple(f for f in bucket.features if f not in by_counts)
        short = select_short_run(gpu, bucket.dim, itemsize, weighted or spec.mean, False)
        long = select_long_run(bucket.dim)
        reason = f"runs below {long.threshold} entries; {short.runs_per_tile} runs a tile, {short.num_warps} warps"
        routes.append(Route("backward short_run", by_runs, reason))
        reason = f"runs from {long.threshold} entries on, in pieces of {long.piece_length}"
        if fused is not None:
            reason += f", {'added up by TMA in any order' if fused.reduce else 'in ordered slots'}"
        path = "backward grad_accum + apply" if fused is None else "backward fused long_run (TLX)"
        routes.append(Route(path, by_runs, reason))
    return Plan(tuple(routes))
