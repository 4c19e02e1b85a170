"""Short runs: a tile of runs a step, summed entry by entry, then the optimizer.

Tiles go to the programs in turn, so that long and short work spreads and all programs stay in a small window of
the weights. Rows and states are loaded before the gradients, because they do not depend on them.
"""

from __future__ import annotations

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import registers_for, sum_gradients, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.runs import RUNS as ALL_RUNS
from fbtriton.backward.runs import bucket_range, row_of_run
from fbtriton.config import Target, planned, select_short_run, target_of
from fbtriton.launch import BucketLaunch, Constants, bucket_launches, cdiv, launch, launch_options
from fbtriton.layout import Entries, RunTables
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile
from fbtriton.spec import OperatorSpec


@triton.jit
def update_short_runs(
    weights_ptr, states, stamp_ptr, grad_ptr, entries, runs, begin, end,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, RUNS: tl.constexpr, UNROLL: tl.constexpr, THRESHOLD: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr, ROW_UNIT: tl.constexpr, GRAD_ALIGNMENT: tl.constexpr, STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """This program's share of the runs begin to end - 1, of which the long ones are left out."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    for tile_start in range(begin + tl.program_id(0) * RUNS, end, tl.num_programs(0) * RUNS):
        run = tile_start + tl.arange(0, RUNS)  # [RUNS]
        live = run < end
        start = tl.load(runs.run_starts + run, mask=live, other=0)
        length = tl.load(runs.run_starts + run + 1, mask=live, other=0) - start
        live = live & (length < THRESHOLD)
        weight_offset, state_row = row_of_run(runs, run, live, ROW_ALIGNMENT, ROW_UNIT)
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


@triton.jit(do_not_specialize=["first_bucket"])
def short_run_kernel(
    weights_ptr, states, stamp_ptr,
    grad_ptr, entries, runs, ranges_ptr, first_bucket,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIMS: tl.constexpr, RUNS: tl.constexpr, UNROLLS: tl.constexpr, THRESHOLD: tl.constexpr,
    ROW_ALIGNMENTS: tl.constexpr, ROW_UNIT: tl.constexpr, GRAD_ALIGNMENTS: tl.constexpr, STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Some buckets, with a constant for each in every tuple; programs with the wide rows start first."""
    for number in tl.static_range(len(DIMS)):
        if tl.program_id(1) == len(DIMS) - 1 - number:
            begin, end = bucket_range(ranges_ptr, first_bucket + number, ALL_RUNS)
            update_short_runs(
                weights_ptr, states, stamp_ptr, grad_ptr, entries, runs, begin, end, LOAD_STATE, UPDATE,
                DIMS[number], RUNS[number], UNROLLS[number], THRESHOLD, ROW_ALIGNMENTS[number], ROW_UNIT,
                GRAD_ALIGNMENTS[number], STOCHASTIC, SCALED, UNIT,
            )  # fmt: skip


@planned
def plan_short_run(
    spec: OperatorSpec, target: Target, form: EntryForm, grad_alignments: tuple[int, ...], long_average: bool,
    threshold: int,
) -> tuple[BucketLaunch, ...]:  # fmt: skip
    optimizer, buckets = OPTIMIZERS[spec.optimizer], spec.layout.buckets
    itemsize = spec.torch_weights_dtype.itemsize
    configs = [select_short_run(target.name, b.dim, itemsize, form.scaled, long_average) for b in buckets]

    def constants(group: slice) -> Constants:
        chosen, of_bucket = buckets[group], configs[group]
        return Constants(
            LOAD_STATE=optimizer.load_state,
            UPDATE=optimizer.update,
            DIMS=tuple(bucket.dim for bucket in chosen),
            RUNS=tuple(config.runs_per_tile for config in of_bucket),
            UNROLLS=tuple(config.unroll for config in of_bucket),
            THRESHOLD=threshold,
            ROW_ALIGNMENTS=tuple(bucket.row_alignment for bucket in chosen),
            ROW_UNIT=spec.layout.row_unit,
            GRAD_ALIGNMENTS=grad_alignments[group],
            SCALED=form.scaled,
            UNIT=form.unit,
            STOCHASTIC=spec.stochastic_rounding,
            **launch_options(of_bucket[0].num_warps, registers_for(of_bucket[0].registers, chosen, spec)),
        )

    return bucket_launches(target, configs, constants)


def short_run(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, grad_output: Tensor, grad_alignments: tuple[int, ...],
    entries: Entries, form: EntryForm, tables: RunTables, threshold: int, long_average: bool, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of all short runs in place."""
    plan = plan_short_run(spec, target_of(weights.device), form, grad_alignments, long_average, threshold)
    for part in plan:
        tiles = cdiv(tables.runs.state_rows.numel(), min(part.constants["RUNS"]))
        launch(
            short_run_kernel,
            part.grid(tiles),
            part.constants,
            first_bucket=part.first_bucket,
            weights_ptr=weights,
            states=states,
            stamp_ptr=stamp,
            grad_ptr=grad_output,
            entries=entries,
            runs=tables.runs,
            ranges_ptr=tables.ranges,
        )
