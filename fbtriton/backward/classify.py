"""Runs -> where each run's row lies, which runs are long, and the pieces that long runs are cut into."""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.config import fixed_grid, select_entry, target_of
from fbtriton.layout import OperatorSpec, RunPieces, SortedRuns
from fbtriton.rows import upper_bound


@triton.jit(do_not_specialize=["num_tables", "num_bucket_bounds"])
def describe_runs_kernel(
    pieces, seed_and_step_ptr,
    runs, key_tables, bucket_keys_ptr, num_tables, num_bucket_bounds,
    BLOCK: tl.constexpr, BUCKETS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """For each run its row's place and its number of pieces. The first program also finds the buckets' runs and
    advances the step; the stamp holds the step that this backward uses."""
    num_runs = tl.load(runs.num_runs)
    for start in range(tl.program_id(0) * BLOCK, num_runs, tl.num_programs(0) * BLOCK):
        run = start + tl.arange(0, BLOCK)  # [BLOCK]
        live = run < num_runs
        key = tl.load(runs.run_keys + run, mask=live, other=0).to(tl.int64)
        table = tl.maximum(upper_bound(key_tables.key_base, num_tables, key) - 1, 0)
        row = key - tl.load(key_tables.key_base + table)
        weight_offset = tl.load(key_tables.weight_offset + table) + row * tl.load(key_tables.dim + table)
        tl.store(pieces.weight_offsets + run, weight_offset, mask=live)
        tl.store(pieces.state_rows + run, tl.load(key_tables.state_base + table) + row, mask=live)
        length = tl.load(runs.run_starts + run + 1, mask=live, other=0) - tl.load(
            runs.run_starts + run, mask=live, other=0
        )
        count = tl.where(length >= THRESHOLD, (length + PIECE - 1) // PIECE, 0)
        tl.store(pieces.piece_starts + run + 1, count, mask=live)  # becomes the running sum
    if tl.program_id(0) == 0:
        tl.store(seed_and_step_ptr + 1, tl.load(seed_and_step_ptr + 1) + 1)
        bound = tl.arange(0, BUCKETS)
        is_bound = bound < num_bucket_bounds
        first_key = tl.load(bucket_keys_ptr + bound, mask=is_bound, other=0)
        tl.store(pieces.bucket_runs + bound, upper_bound(runs.run_keys, num_runs, first_key - 1), mask=is_bound)


@triton.jit
def expand_pieces_kernel(pieces, runs, BLOCK: tl.constexpr):
    """The run of each piece."""
    num_runs = tl.load(runs.num_runs)
    num_pieces = tl.load(pieces.piece_starts + num_runs)
    for start in range(tl.program_id(0) * BLOCK, num_pieces, tl.num_programs(0) * BLOCK):
        piece = start + tl.arange(0, BLOCK)  # [BLOCK]
        live = piece < num_pieces
        run = upper_bound(pieces.piece_starts + 1, num_runs, tl.where(live, piece, 0))
        tl.store(pieces.piece_runs + piece, run, mask=live)


def max_pieces(num_entries: int, threshold: int) -> int:
    """A bound on the pieces of all long runs: a run of n >= threshold entries has at most n / threshold pieces,
    because a piece is at least as long as the threshold."""
    return num_entries // threshold


def classify(
    *, runs: SortedRuns, seed_and_step: Tensor, threshold: int, piece_length: int, spec: OperatorSpec
) -> RunPieces:
    """Describe the runs; advances the step in seed_and_step."""
    config = select_entry()
    layout = spec.layout
    device = seed_and_step.device
    on_device = layout.on_device(device)
    num_entries = runs.entries.payload.numel()
    bounds = len(layout.buckets) + 1
    pieces = RunPieces(
        weight_offsets=torch.empty(num_entries, dtype=torch.int64, device=device),
        state_rows=torch.empty(num_entries, dtype=torch.int64, device=device),
        piece_starts=torch.zeros(num_entries + 1, dtype=torch.int32, device=device),
        piece_runs=torch.empty(max_pieces(num_entries, threshold), dtype=torch.int32, device=device),
        bucket_runs=torch.empty(bounds, dtype=torch.int32, device=device),
    )
    target = target_of(device)
    blocks = triton.cdiv(num_entries, config.block)
    describe_runs_kernel[fixed_grid(target, config.programs_per_multiprocessor, blocks)](
        pieces=pieces,
        seed_and_step_ptr=seed_and_step,
        runs=runs,
        key_tables=on_device.key_tables,
        bucket_keys_ptr=on_device.bucket_keys,
        num_tables=len(layout.rows),
        num_bucket_bounds=bounds,
        BLOCK=config.block,
        BUCKETS=triton.next_power_of_2(bounds),
        THRESHOLD=threshold,
        PIECE=piece_length,
        num_warps=config.num_warps,
    )
    if pieces.piece_runs.numel():
        pieces = pieces._replace(piece_starts=torch.cumsum(pieces.piece_starts, 0, dtype=torch.int32))
        blocks = triton.cdiv(pieces.piece_runs.numel(), config.block)
        expand_pieces_kernel[fixed_grid(target, config.programs_per_multiprocessor, blocks)](
            pieces=pieces, runs=runs, BLOCK=config.block, num_warps=config.num_warps
        )
    return pieces
