"""What a kernel is launched with: the target GPU, frozen configurations, and how tests force one.

`select_*` are pure functions of the target and of shapes; nothing is tuned inside a user's training step. A row for a
GPU comes with the measurement that justifies it; other GPUs and shapes get defaults.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch

from fbtriton import tlx
from fbtriton._triton import HAS_TRITON

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is decorated


kernels_on_cpu: ContextVar[bool] = ContextVar("fbtriton_kernels_on_cpu", default=INTERPRET)  # see compile_only
backend: ContextVar[str] = ContextVar("fbtriton_backend", default="hip" if torch.version.hip else "cuda")


@dataclass(frozen=True)
class Target:
    """What a kernel runs on."""

    name: str
    multiprocessors: int
    capability: int = 0  # of an NVIDIA GPU: 90, 100, ...


@dataclass(frozen=True)
class EntryConfig:
    """Kernels that work on entries, runs or bags as integers, not on rows."""

    block: int = 256  # entries of one step
    programs_per_multiprocessor: int = 8


@dataclass(frozen=True)
class GatherConfig:
    """The generic forward. Bags of one feature lie side by side in a tile, and so do some rows of each bag: one bag
    with many rows suits long bags, many bags with one row short ones."""

    bags_per_program: int  # a power of two
    rows_per_bag: int  # of one step; a power of two
    num_warps: int
    unroll: int = 1  # steps whose loads are issued together
    registers: int | None = None  # told a limit, even one it stays below, ptxas keeps more loads in flight
    columns: int = 2048  # of one program, a power of two; wider rows are shared out among programs


@dataclass(frozen=True)
class HistogramConfig:
    """The forward of small tables, and which features take it."""

    max_rows: int = 128  # of a table
    min_length: float = 40.0  # ids in a bag
    ids: int = 64  # counted together; a power of two
    count_bags: int = 8  # of a program, one after the other; a power of two
    count_warps: int = 1
    count_registers: int | None = 64
    pool_bags: int = 128  # of a program, side by side; a power of two, at least 16
    pool_warps: int = 4
    pool_registers: int | None = 128
    pool_row_bytes: int = 128  # of a row of the table in one program; a power of two, at least 64
    max_repeats: float = 8.0  # ids in a long bag for each row of the table; a hot row's count of 255 is slow
    grad_chunk: int = 2048  # of the backward: bags of a program, a multiple of grad_bags
    grad_bags: int = 64  # side by side; a power of two, at least 16
    grad_columns: int = 64  # a power of two, at least 16
    grad_warps: int = 4


@dataclass(frozen=True)
class SampleGradConfig:
    """The gradient of per-sample weights: one bag a program."""

    rows_per_step: int
    num_warps: int


@dataclass(frozen=True)
class LineariseConfig:
    """A block of neighbouring entries a program."""

    block: int = 1024  # a multiple of RunsConfig.block
    ways: int = 256  # offsets that are compared at once in the search for the block's bags
    num_warps: int = 4
    registers: int | None = 64  # see GatherConfig
    offset_bits: int = 32  # of an offset that the sort carries; fewer only to test the wider forms


@dataclass(frozen=True)
class RunsConfig:
    """The passes over the sorted keys: neighbouring blocks of keys a program."""

    block: int = 512
    num_warps: int = 4
    programs_per_multiprocessor: int = 8  # as many as run at once
    registers: int | None = 56  # see GatherConfig


@dataclass(frozen=True)
class ShortRunConfig:
    """Runs below the threshold: a tile of runs a step."""

    runs_per_tile: int
    num_warps: int
    unroll: int = 2  # gradients of each run that are loaded before they are added
    programs_per_multiprocessor: int = 128  # a multiprocessor holds 32 programs of one warp; those that wait even out
    registers: int | None = 64  # see GatherConfig


@dataclass(frozen=True)
class LongRunConfig:
    """Long runs: pieces of about one length, then a tree over their partial gradients."""

    threshold: int = 32  # entries from which a run is long
    piece_length: int = 128  # entries; a first or last piece has as many as the threshold or more, and fewer than both
    fan_in: int = 64  # partial gradients that one program of one level adds
    rows_per_step: int = 8
    unroll: int = 2  # gradients of each lane that are loaded before they are added
    slots_per_step: int = 4  # partial gradients that are loaded before they are added; a power of two
    num_warps: int = 1
    programs_per_multiprocessor: int = 128
    pieces_per_program: int = 4  # or more, of grad_accum
    runs_per_program: int = 8  # or more, of apply
    registers: int | None = None  # of grad_accum; see GatherConfig

    def __post_init__(self) -> None:
        if min(self.threshold, self.piece_length) < 1 or self.fan_in < 2:
            raise ValueError(f"LongRunConfig needs threshold >= 1, piece_length >= 1 and fan_in >= 2, got {self}")


@dataclass(frozen=True)
class FusedConfig:
    """Long runs in one launch, see `fbtriton.tlx.fused_long_run`; how runs are cut comes from LongRunConfig."""

    clc: bool = False  # tiles are handed out by cluster launch control: sm_100 and later, with TLX
    reduce: bool = False  # partial gradients are added up by TMA, in any order: sm_90 and later, with TLX
    programs_per_multiprocessor: int = 32  # or tiles, with clc; more of them even out the work, empty ones cost time
    max_block_dim: int = 2048  # columns of a tile
    max_reduce_block_dim: int = 256  # a TMA box is no wider

    def fits(self, block_dims: tuple[int, ...]) -> bool:
        """Whether all buckets of an operator are in the range. A TMA box has at least 16 bytes."""
        widest = self.max_reduce_block_dim if self.reduce else self.max_block_dim
        return all(4 * self.reduce <= block_dim <= widest for block_dim in block_dims)


@dataclass(frozen=True)
class TableRow:
    """A configuration that was the fastest when it was measured."""

    gpu: str
    workload: str
    date: str
    dim: int
    itemsize: int  # bytes of a weight
    mean_length: float  # ids in a bag
    config: Any


LONG_BAG = 48

# Printed by `python -m bench tune gather`; rows that are within 3 % of the default are left out, unless a row of
# bags of another length would be taken.
GATHER_ROWS: tuple[TableRow, ...] = (
    TableRow("NVIDIA H200", "fbgemm-default", "2026-11-30", 128, 2, 20.0, GatherConfig(1, 4, 1, 4, 64, 128)),
    TableRow("NVIDIA H200", "fp32-uniform", "2026-11-30", 64, 4, 20.0, GatherConfig(1, 4, 1, 4, 56, 64)),
    TableRow("NVIDIA H200", "long-runs", "2026-11-30", 128, 2, 30.0, GatherConfig(4, 1, 1, 2, 56, 128)),
    TableRow("NVIDIA H200", "table-sharing", "2026-11-30", 256, 2, 7.0, GatherConfig(2, 1, 1, 2, 64, 256)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 4, 2, 8.0, GatherConfig(16, 4, 1, 4, 64, 4)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 8, 2, 8.0, GatherConfig(8, 4, 1, 4, 64, 8)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 16, 2, 8.0, GatherConfig(8, 4, 2, 4, 64, 16)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 32, 2, 8.0, GatherConfig(4, 2, 1, 4, 64, 32)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 192, 2, 8.0, GatherConfig(2, 1, 1, 2, 64, 256)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 256, 2, 8.0, GatherConfig(2, 1, 1, 2, 64, 256)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 320, 2, 8.0, GatherConfig(1, 1, 1, 4, 64, 512)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 384, 2, 8.0, GatherConfig(1, 1, 1, 4, 64, 512)),
    TableRow("NVIDIA H200", "mixed-dims", "2026-11-30", 512, 2, 8.0, GatherConfig(1, 1, 1, 4, 64, 512)),
    TableRow("NVIDIA H200", "dlrm-mix", "2026-11-30", 32, 2, 8.9, GatherConfig(16, 1, 2, 4, 64, 32)),
)


@functools.cache
def gather_rows(gpu: str, dim: int, itemsize: int) -> tuple[TableRow, ...]:
    return tuple(row for row in GATHER_ROWS if (row.gpu, row.dim, row.itemsize) == (gpu, dim, itemsize))


def nearest_row(rows: tuple[TableRow, ...], mean_length: float) -> tuple[Any, str] | None:
    """The row whose bags are nearest in length, if that is within a factor of 1.5."""

    def distance(row: TableRow) -> float:
        return abs(math.log(max(mean_length, 0.1) / row.mean_length))

    best = min(rows, key=distance, default=None)
    if best is None or distance(best) > math.log(1.5):
        return None
    return best.config, f"measured on {best.workload}, {best.date}"


# Printed by `python -m bench tune short-run`; mean_length is not looked at.
SHORT_RUN_ROWS: dict[tuple[str, int, int], TableRow] = {
    (row.gpu, row.dim, row.itemsize): row
    for row in (
        TableRow("NVIDIA H200", "fp32-uniform", "2026-11-30", 64, 4, 20.0, ShortRunConfig(8, 1, 1, 32)),
        TableRow("NVIDIA H200", "table-sharing", "2026-11-30", 64, 2, 7.0, ShortRunConfig(4, 1, 4)),
        TableRow("NVIDIA H200", "table-sharing", "2026-11-30", 256, 2, 7.0, ShortRunConfig(2, 2, 4)),
    )
}


@dataclass(frozen=True, eq=False)
class ForcedConfig:
    """None = selected from the shapes. A mapping has one configuration for each dim. Equal only to itself."""

    entry: EntryConfig | None = None
    gather: GatherConfig | Mapping[int, GatherConfig] | None = None
    histogram: HistogramConfig | None = None
    linearise: LineariseConfig | None = None
    runs: RunsConfig | None = None
    short_run: ShortRunConfig | Mapping[int, ShortRunConfig] | None = None
    long_run: LongRunConfig | Mapping[int, LongRunConfig] | None = None
    fused: FusedConfig | bool | None = None  # False = never
    sort: str | None = None  # "torch" or "cuda.compute", which then must work


_forced = ForcedConfig()  # of the process, because autograd runs a GPU's backward in a thread of its own


@contextlib.contextmanager
def force_config(**configs: Any) -> Iterator[None]:
    """Use the given configurations until the end of the block, for tests and benchmarks: fields of `ForcedConfig`."""
    global _forced
    before = _forced
    _forced = replace(_forced, **configs)
    try:
        yield
    finally:
        _forced = before


P = ParamSpec("P")
T = TypeVar("T")


def planned(function: Callable[P, T]) -> Callable[P, T]:
    """Remember what a function makes of hashable arguments; what is forced makes other plans, as do other backends."""
    make: Callable[..., T] = function
    remembered: Any = functools.lru_cache(maxsize=1024)(lambda forced, backend, *arguments: make(*arguments))

    @functools.wraps(function)
    def plan(*arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "plans take their arguments by position"
        return remembered(_forced, backend.get(), *arguments)  # type: ignore[no-any-return]

    return plan


@functools.cache
def target_of(device: torch.device) -> Target:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
        return Target(properties.name, properties.multi_processor_count, capability)
    return Target("interpreter", 1)  # few programs, so that every loop over a fixed grid takes several steps


def uses_kernels(device: torch.device) -> bool:
    """Kernels run on GPU tensors, and on CPU tensors under TRITON_INTERPRET=1; otherwise the reference runs."""
    return device.type != "cpu" or kernels_on_cpu.get()


def _warps_for(block_dim: int) -> int:
    return max(1, min(8, block_dim // 512))


def select_entry() -> EntryConfig:
    return _forced.entry or EntryConfig()


def select_gather(gpu: str, dim: int, itemsize: int, mean_length: float) -> tuple[GatherConfig, str]:
    """The configuration for rows of dim elements and bags of mean_length ids, and where it comes from."""
    if forced := _forced.gather:
        return forced if isinstance(forced, GatherConfig) else forced[dim], "forced"
    return nearest_row(gather_rows(gpu, dim, itemsize), mean_length) or default_gather(
        dim, itemsize, mean_length > LONG_BAG
    )


@functools.cache
def default_gather(dim: int, itemsize: int, long_bags: bool) -> tuple[GatherConfig, str]:
    """What was best or near it where it was measured: 32 bytes of each lane's own a step."""
    row_bytes = itemsize << (dim - 1).bit_length()
    if long_bags:
        rows = _power_of_two(1024 / row_bytes, 1, 32)
        config = GatherConfig(1, rows, num_warps=_power_of_two(row_bytes / 1024, 1, 4), unroll=4, registers=64)
        return config, f"default: bags of more than {LONG_BAG} ids"
    bags = _power_of_two(1024 / row_bytes, 1, 64)
    config = GatherConfig(bags, 1, num_warps=_power_of_two(row_bytes / 1024, 1, 4), unroll=2, registers=56)
    return config, f"default: bags of at most {LONG_BAG} ids"


def _power_of_two(value: float, least: int, most: int) -> int:
    """The largest power of two that is at most value, kept in [least, most]."""
    return max(least, min(most, 1 << max(0, int(value).bit_length() - 1)))


def select_histogram() -> HistogramConfig:
    return _forced.histogram or HistogramConfig()


def select_sample_grad(block_dim: int) -> SampleGradConfig:
    return SampleGradConfig(rows_per_step=max(1, min(32, 1024 // block_dim)), num_warps=_warps_for(block_dim))


def select_linearise() -> LineariseConfig:
    return _forced.linearise or LineariseConfig()


def select_runs() -> RunsConfig:
    return _forced.runs or RunsConfig()


LONG_AVERAGE_RUN = 8.0


def select_short_run(gpu: str, dim: int, itemsize: int, scaled: bool, long_average: bool) -> ShortRunConfig:
    """For rows of dim elements of itemsize bytes; scaled = entries have factors; long_average = there are at least
    LONG_AVERAGE_RUN entries for each row of all tables."""
    if forced := _forced.short_run:
        return forced if isinstance(forced, ShortRunConfig) else forced[dim]
    block_dim = 1 << (dim - 1).bit_length()
    runs, warps = max(1, min(32, 512 // block_dim)), _warps_for(block_dim)
    registers = _registers_for(block_dim, warps)
    if long_average:
        # As many programs as run at once: all then work on rows of one table, whose gradients stay in the L2 cache.
        # From torchrec-2365, where five times as many take 17 % longer.
        return ShortRunConfig(2 * runs, 2 * warps, 4, 12 // warps, registers and registers + 16)
    if scaled:
        return ShortRunConfig(runs, 2 * warps, 2, 48, registers)
    found = SHORT_RUN_ROWS.get((gpu, dim, itemsize))
    return found.config if found else ShortRunConfig(runs, warps, registers=registers)


def _registers_for(block_dim: int, warps: int) -> int | None:
    """Enough for a gradient, a row and what is under way, unless the row is very wide."""
    return 64 if block_dim <= 512 * warps else None


def select_long_run(dim: int) -> LongRunConfig:
    if forced := _forced.long_run:
        return forced if isinstance(forced, LongRunConfig) else forced[dim]
    block_dim = 1 << (dim - 1).bit_length()
    warps = _warps_for(block_dim)
    rows, unroll = max(1, min(16, 256 // block_dim)), 4 if block_dim <= 256 else 2
    registers = _registers_for(block_dim, warps)
    slots = max(1, min(16, 512 // block_dim))
    return LongRunConfig(rows_per_step=rows, unroll=unroll, slots_per_step=slots, num_warps=warps, registers=registers)


def select_fused(target: Target, block_dims: tuple[int, ...], deterministic: bool) -> FusedConfig | None:
    """How long runs are done in one launch; None = accumulate and apply apart. Warns once where TLX is missing."""
    if _forced.fused is not None:
        return _forced.fused if isinstance(_forced.fused, FusedConfig) else None
    if target.capability < 100:
        return None
    if not tlx.available():
        _warn_of_missing_tlx(target.name)
        return None
    # Two tiles for each program of one warp that a multiprocessor holds. Not measured; on an H200, which has no cluster
    # launch control, one launch is mostly slower than apart: bench/results/nvidia-h200/tlx-2026-11-30.md.
    chosen = FusedConfig(clc=True, reduce=not deterministic, programs_per_multiprocessor=64)
    for config in (chosen, replace(chosen, reduce=False)):
        if config.fits(block_dims):
            return config
    return None


@functools.cache
def _warn_of_missing_tlx(name: str) -> None:
    warnings.warn(
        f"fbtriton: {name} could take long runs in one launch, but this Triton has no TLX; README says how to install"
        " the fork that has it. The other kernels run in its place",
        stacklevel=2,
    )


def select_sort() -> str | None:
    return _forced.sort
