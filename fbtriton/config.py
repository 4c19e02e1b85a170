"""What a kernel is launched with: the target GPU, frozen configurations, and how tests force one.

`select_*` are pure functions of the target and of shapes; nothing is tuned inside a user's training step. There is
one row for every GPU so far, `DEFAULT`; rows for a GPU come with the measurement that justifies them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from fbtriton._triton import HAS_TRITON

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is decorated


kernels_on_cpu: ContextVar[bool] = ContextVar("fbtriton_kernels_on_cpu", default=INTERPRET)  # see compile_only


@dataclass(frozen=True)
class Target:
    """What a kernel runs on."""

    name: str
    multiprocessors: int


@dataclass(frozen=True)
class EntryConfig:
    """Kernels that work on entries, runs or bags as integers, not on rows."""

    block: int = 256  # entries of one step
    num_warps: int = 4
    programs_per_multiprocessor: int = 8


@dataclass(frozen=True)
class GatherConfig:
    """The generic forward: the rows of one long bag side by side, or several short bags side by side."""

    rows_per_step: int  # of each bag
    num_warps: int
    bags_per_program: int = 1  # a power of two


@dataclass(frozen=True)
class LineariseConfig:
    """A block of neighbouring entries a program."""

    block: int = 1024  # a multiple of RunsConfig.block
    ways: int = 256  # offsets that are compared at once in the search for the block's bags
    num_warps: int = 8
    offset_bits: int = 32  # of an offset that the sort carries; fewer only to test the wider forms


@dataclass(frozen=True)
class RunsConfig:
    """The passes over the sorted keys: neighbouring blocks of keys a program; and the tables of pieces."""

    block: int = 512
    num_warps: int = 8
    programs_per_multiprocessor: int = 8


@dataclass(frozen=True)
class ShortRunConfig:
    """Runs below the threshold: a tile of runs a step."""

    runs_per_tile: int
    num_warps: int
    unroll: int = 2  # gradients of each run that are loaded before they are added
    programs_per_multiprocessor: int = 64  # a multiprocessor holds 32 programs of one warp


@dataclass(frozen=True)
class LongRunConfig:
    """Long runs: pieces of fixed length, then a tree over their partial gradients."""

    threshold: int = 32  # entries from which a run is long
    piece_length: int = 64  # at least the threshold: it bounds the number of pieces by N / threshold
    fan_in: int = 64  # partial gradients that one program of one level adds
    rows_per_step: int = 8
    unroll: int = 2  # gradients of each lane that are loaded before they are added
    num_warps: int = 1
    programs_per_multiprocessor: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= self.piece_length or self.piece_length % self.rows_per_step or self.fan_in < 2:
            raise ValueError(
                "LongRunConfig needs 1 <= threshold <= piece_length, piece_length a multiple of rows_per_step and"
                f" fan_in >= 2, got {self}"
            )


@dataclass(frozen=True)
class ForcedConfig:
    """None = selected from the shapes."""

    entry: EntryConfig | None = None
    gather: GatherConfig | None = None
    linearise: LineariseConfig | None = None
    runs: RunsConfig | None = None
    short_run: ShortRunConfig | None = None
    long_run: LongRunConfig | None = None
    sort: str | None = None  # "torch" or "cuda.compute", which then must work


_forced: ContextVar[ForcedConfig] = ContextVar("fbtriton_forced_config", default=ForcedConfig())  # noqa: B039  (it is frozen)


@contextlib.contextmanager
def force_config(**configs: Any) -> Iterator[None]:
    """Use the given configurations in this context, for tests and benchmarks: fields of `ForcedConfig`."""
    token = _forced.set(replace(_forced.get(), **configs))
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def target_of(device: torch.device) -> Target:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Target(properties.name, properties.multi_processor_count)
    return Target("interpreter", 1)  # few programs, so that every loop over a fixed grid takes several steps


def uses_kernels(device: torch.device) -> bool:
    """Kernels run on GPU tensors, and on CPU tensors under TRITON_INTERPRET=1; otherwise the reference runs."""
    return device.type != "cpu" or kernels_on_cpu.get()


def _warps_for(block_dim: int) -> int:
    return max(1, min(8, block_dim // 512))


def select_entry() -> EntryConfig:
    return _forced.get().entry or EntryConfig()


def select_gather(block_dim: int) -> GatherConfig:
    rows = max(1, min(32, 1024 // block_dim))
    return _forced.get().gather or GatherConfig(rows_per_step=rows, num_warps=_warps_for(block_dim))


def select_linearise() -> LineariseConfig:
    return _forced.get().linearise or LineariseConfig()


def select_runs() -> RunsConfig:
    return _forced.get().runs or RunsConfig()


def select_short_run(block_dim: int) -> ShortRunConfig:
    runs = max(1, min(32, 512 // block_dim))
    return _forced.get().short_run or ShortRunConfig(runs_per_tile=runs, num_warps=_warps_for(block_dim))


def select_long_run(block_dim: int) -> LongRunConfig:
    rows = max(1, min(16, 512 // block_dim))
    return _forced.get().long_run or LongRunConfig(rows_per_step=rows, num_warps=_warps_for(block_dim))


def select_sort() -> str | None:
    return _forced.get().sort


def fixed_grid(target: Target, programs_per_multiprocessor: int, upper_bound: int) -> tuple[int]:
    """Programs that loop over a count known on the device only; never more than could have work."""
    return (max(1, min(target.multiprocessors * programs_per_multiprocessor, upper_bound)),)
