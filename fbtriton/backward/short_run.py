"""Short runs: a tile of runs a step, summed entry by entry, then the optimizer.

Tiles go to the programs in turn, so that long and short work spreads and all programs stay in a small window of
the weights. Rows and states are loaded before the gradients, because they do not depend on them.
"""

from __future__ import annotations

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import sum_gradients, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.runs import RUNS as ALL_RUNS
from fbtriton.backward.runs import bucket_range
from fbtriton.config import fixed_grid, launch_options, select_short_run, target_of
from fbtriton.layout import Bucket, Entries, OperatorSpec, RunTables
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile


@triton.jit(do_not_specialize=["bucket"])
def short_run_kernel(
    weights_ptr, states, stamp_ptr,
    grad_ptr, entries, runs, ranges_ptr, bucket,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, RUNS: tl.constexpr, THRESHOLD: tl.constexpr,
    UNROLL: tl.constexpr, ROW_ALIGNMENT: tl.constexpr, GRAD_ALIGNMENT: tl.constexpr, STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    begin, end = bucket_range(ranges_ptr, bucket, ALL_RUNS)
    for tile_start in range(begin + tl.program_id(0) * RUNS, end, tl.num_programs(0) * RUNS):
        run = tile_start + tl.arange(0, RUNS)  # [RUNS]
        live = run < end
        start = tl.load(runs.run_starts + run, mask=live, other=0)
        length = tl.load(runs.run_starts + run + 1, mask=live, other=0) - start
        live = live & (length < THRESHOLD)
        weight_offset = tl.load(runs.weight_offsets + run, mask=live, other=0)
        weight_offset = tl.multiple_of(weight_offset, [ROW_ALIGNMENT])
        state_row = tl.load(runs.state_rows + run, mask=live, other=0)
        weight = load_tile(weights_ptr, weight_offset, live, DIM, BLOCK_D)
        state = LOAD_STATE(states, state_row, weight_offset, live, DIM, BLOCK_D)
        length = tl.where(live, length, 0)
        grad = sum_gradients(
            grad_ptr, entries, start, length, DIM, BLOCK_D, UNROLL, GRAD_ALIGNMENT, SCALED, UNIT
        )  # fmt: skip
        update_rows(
            weights_ptr, states, stamp_ptr, weight, grad, state, weight_offset, state_row, live,
            UPDATE, DIM, BLOCK_D, STOCHASTIC,
        )  # fmt: skip


def short_run(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, grad_output: Tensor, grad_alignment: int,
    entries: Entries, form: EntryForm, tables: RunTables, bucket: Bucket, bucket_number: int, threshold: int,
    spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of one bucket's short runs in place."""
    config = select_short_run(bucket.dim)
    optimizer = OPTIMIZERS[spec.optimizer]
    tiles = triton.cdiv(tables.runs.state_rows.numel(), config.runs_per_tile)
    short_run_kernel[fixed_grid(target_of(weights.device), config.programs_per_multiprocessor, tiles)](
        weights_ptr=weights,
        states=states,
        stamp_ptr=stamp,
        grad_ptr=grad_output,
        entries=entries,
        runs=tables.runs,
        ranges_ptr=tables.ranges,
        bucket=bucket_number,
        LOAD_STATE=optimizer.load_state,
        UPDATE=optimizer.update,
        DIM=bucket.dim,
        BLOCK_D=bucket.block_dim,
        RUNS=config.runs_per_tile,
        THRESHOLD=threshold,
        UNROLL=config.unroll,
        ROW_ALIGNMENT=bucket.row_alignment,
        GRAD_ALIGNMENT=grad_alignment,
        SCALED=form.scaled,
        UNIT=form.unit,
        STOCHASTIC=spec.stochastic_rounding,
        **launch_options(config.num_warps, config.registers),
    )
