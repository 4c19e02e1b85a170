"""Long runs -> what each piece and each group covers, so that the kernels that add gradients look nothing up."""

from __future__ import annotations

from fbtriton._triton import tl, triton
from fbtriton.backward.runs import GROUPS, KINDS, LONG_RUNS, PIECES, num_buckets
from fbtriton.config import LongRunConfig, select_runs, target_of
from fbtriton.launch import cdiv, fixed_grid, launch
from fbtriton.layout import RunTables
from fbtriton.rows import upper_bound


@triton.jit(do_not_specialize=["num_buckets"])
def expand_kernel(
    pieces, groups,
    runs, long_runs, ranges_ptr, num_buckets,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, FAN_IN: tl.constexpr,
):  # fmt: skip
    total_ptr = ranges_ptr + num_buckets * KINDS
    num_long = tl.load(total_ptr + LONG_RUNS)
    num_pieces = tl.load(total_ptr + PIECES)
    num_groups = tl.load(total_ptr + GROUPS)
    for start in range(tl.program_id(0) * BLOCK, num_pieces, tl.num_programs(0) * BLOCK):
        piece = start + tl.arange(0, BLOCK)  # [BLOCK]
        live = piece < num_pieces
        long_run = upper_bound(long_runs.first_pieces, num_long, tl.where(live, piece, 0)) - 1
        run = tl.load(long_runs.runs + long_run, mask=live, other=0)
        number = piece - tl.load(long_runs.first_pieces + long_run, mask=live, other=0)
        piece_start = tl.load(runs.run_starts + run, mask=live, other=0) + number * PIECE
        run_end = tl.load(runs.run_starts + run + 1, mask=live, other=0)
        tl.store(pieces.starts + piece, piece_start, mask=live)
        tl.store(pieces.ends + piece, tl.minimum(piece_start + PIECE, run_end), mask=live)
        if pieces.arrivals is not None:
            tl.store(pieces.long_runs + piece, long_run, mask=live)
            tl.store(pieces.arrivals + piece, 0, mask=live)
    for start in range(tl.program_id(0) * BLOCK, num_groups, tl.num_programs(0) * BLOCK):
        group = start + tl.arange(0, BLOCK)  # [BLOCK]
        live = group < num_groups
        # Of the runs with the same first group, all but the last have no groups.
        long_run = upper_bound(long_runs.first_groups, num_long, tl.where(live, group, 0)) - 1
        run = tl.load(long_runs.runs + long_run, mask=live, other=0)
        length = tl.load(runs.run_starts + run + 1, mask=live, other=0) - tl.load(
            runs.run_starts + run, mask=live, other=0
        )
        number = group - tl.load(long_runs.first_groups + long_run, mask=live, other=0)
        first_piece = tl.load(long_runs.first_pieces + long_run, mask=live, other=0) + number * FAN_IN
        tl.store(groups.first_pieces + group, first_piece, mask=live)
        tl.store(groups.pieces_left + group, (length + PIECE - 1) // PIECE - number * FAN_IN, mask=live)
        tl.store(groups.numbers + group, number, mask=live)


def expand(*, tables: RunTables, long_run: LongRunConfig) -> None:
    """Fill tables.pieces and tables.groups."""
    num_pieces = tables.pieces.starts.numel()
    if num_pieces == 0:
        return
    config = select_runs()
    grid = fixed_grid(
        target_of(tables.ranges.device), config.programs_per_multiprocessor, cdiv(num_pieces, config.block)
    )
    launch(
        expand_kernel,
        grid,
        pieces=tables.pieces,
        groups=tables.groups,
        runs=tables.runs,
        long_runs=tables.long_runs,
        ranges_ptr=tables.ranges,
        num_buckets=num_buckets(tables),
        BLOCK=config.block,
        PIECE=long_run.piece_length,
        FAN_IN=long_run.fan_in,
        num_warps=config.num_warps,
    )
