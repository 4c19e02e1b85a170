"""Long runs: each piece is summed into a slot of its own, slots are added as a tree, and the sum updates the row.

Example, a run of 7 pieces, fan-in 2; each level adds the slots of a group into the group's first:

    grad_accum              0 1 2 3 4 5 6
    add_groups, span 1      01  23  45  6
    add_groups, span 2      0123    456
    apply, span 4           0123 + 456, then the optimizer

Each run has the levels that its own number of pieces asks for, and slots are added in the order of the run, so the
result does not depend on which program added what.
"""

from __future__ import annotations

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import registers_for, sum_piece, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.runs import (
    KINDS,
    LONG_RUNS,
    PIECES,
    bucket_range,
    count_pieces,
    piece_bounds,
    row_of_run,
)
from fbtriton.config import LongRunConfig, Target, planned, select_long_run, target_of
from fbtriton.launch import BucketLaunch, Constants, bucket_launches, cdiv, fixed_grid, launch, launch_options
from fbtriton.layout import Entries, RunTables
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile, upper_bound
from fbtriton.spec import OperatorSpec


@triton.jit
def store_slot(partials_ptr, slot, partial_stride, value, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """value [1, BLOCK_D]"""
    wide = slot + tl.zeros([1], tl.int64)  # before the product
    column = tl.arange(0, BLOCK_D)
    pointer = partials_ptr + (wide * partial_stride)[:, None] + column[None, :]
    tl.store(pointer, value, mask=(column < DIM)[None, :])


@triton.jit
def add_slots(
    partials_ptr, first, span, count, partial_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    """Sum of the slots first, first + span, ..., count of them. -> [1, BLOCK_D]"""
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for step in range(0, count, ROWS):
        number = step + tl.arange(0, ROWS).to(tl.int64)
        offset = (first + number * span) * partial_stride
        total += load_tile(partials_ptr, offset, number < count, DIM, BLOCK_D)
    return tl.sum(total, axis=0, keep_dims=True)


@triton.jit
def find_run(runs, long_runs, begin, end, piece):
    """The long run, among begin to end - 1, that a piece is of; its first piece, and its sorted entries."""
    number = upper_bound(long_runs.first_pieces + begin, end - begin, piece + tl.zeros([1], tl.int32))
    long_run = begin + tl.sum(number) - 1
    run = tl.load(long_runs.runs + long_run)
    first = tl.load(long_runs.first_pieces + long_run)
    return long_run, first, tl.load(runs.run_starts + run), tl.load(runs.run_starts + run + 1)


@triton.jit
def run_pieces(runs, run, THRESHOLD: tl.constexpr, PIECE: tl.constexpr):
    """How many pieces a long run has. run [K] -> [K]"""
    return count_pieces(tl.load(runs.run_starts + run), tl.load(runs.run_starts + run + 1), THRESHOLD, PIECE)


@triton.jit
def sum_pieces(
    partials_ptr, grad_ptr, entries, runs, long_runs, ranges_ptr, bucket, partial_stride,
    DIM: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """This program's share of a bucket's pieces."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    begin, end = bucket_range(ranges_ptr, bucket, PIECES)
    first_long, last_long = bucket_range(ranges_ptr, bucket, LONG_RUNS)
    for piece in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        _, first, run_start, run_end = find_run(runs, long_runs, first_long, last_long, piece)
        piece_start, piece_end = piece_bounds(run_start, run_end, piece - first, THRESHOLD, PIECE)
        grad = sum_piece(
            grad_ptr, entries, piece_start, piece_end, DIM, ROWS, UNROLL, GRAD_ALIGNMENT, SCALED, UNIT
        )  # fmt: skip
        store_slot(partials_ptr, piece, partial_stride, grad, DIM, BLOCK_D)


@triton.jit(do_not_specialize=["first_bucket"])
def grad_accum_kernel(
    partials_ptr, grad_ptr, entries, runs, long_runs, ranges_ptr, first_bucket, partial_stride,
    DIMS: tl.constexpr, ROWS: tl.constexpr, UNROLLS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
    GRAD_ALIGNMENTS: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Some buckets, with a constant for each in every tuple; programs with the wide rows start first."""
    for number in tl.static_range(len(DIMS)):
        if tl.program_id(1) == len(DIMS) - 1 - number:
            sum_pieces(
                partials_ptr, grad_ptr, entries, runs, long_runs, ranges_ptr, first_bucket + number, partial_stride,
                DIMS[number], ROWS[number], UNROLLS[number], THRESHOLD, PIECE, GRAD_ALIGNMENTS[number], SCALED, UNIT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_buckets", "span"])
def add_groups_kernel(
    partials_ptr, runs, long_runs, ranges_ptr, num_buckets, span, partial_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
    FAN_IN: tl.constexpr,
):  # fmt: skip
    """Groups of FAN_IN slots, span pieces apart. A window of as many pieces a step: of the runs that have groups, which
    are longer, at most two have one that starts there, the run of the window's first piece and another of its last."""
    num_long = tl.load(ranges_ptr + num_buckets * KINDS + LONG_RUNS)
    num_pieces = tl.load(ranges_ptr + num_buckets * KINDS + PIECES)
    width = FAN_IN * span
    side = tl.arange(0, 2)
    for window in range(tl.program_id(0) * width, num_pieces, tl.num_programs(0) * width):
        piece = tl.minimum(window + side * (width - 1), num_pieces - 1)  # [2]
        long_run = upper_bound(long_runs.first_pieces, num_long, piece) - 1
        first = tl.load(long_runs.first_pieces + long_run)
        end = first + run_pieces(runs, tl.load(long_runs.runs + long_run), THRESHOLD, PIECE)
        group = first + tl.maximum(window - first + width - 1, 0) // width * width
        slots = tl.minimum((end - group + span - 1) // span, FAN_IN)
        slots = tl.where((end - first > width) & ((side == 0) | (first > window)), slots, 0)
        for chosen in tl.static_range(2):
            count = tl.sum(tl.where(side == chosen, slots, 0))
            if count > 1:
                slot = tl.sum(tl.where(side == chosen, group, 0))
                total = add_slots(partials_ptr, slot, span, count, partial_stride, DIM, BLOCK_D, ROWS)
                tl.debug_barrier()  # the first slot is read before it is written
                store_slot(partials_ptr, slot, partial_stride, total, DIM, BLOCK_D)


@triton.jit
def update_long_runs(
    weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, begin, end, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, SLOTS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr, FAN_IN: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr, ROW_UNIT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """This program's share of the long runs begin to end - 1."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    for long_run in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        run = tl.load(long_runs.runs + long_run) + tl.zeros([1], tl.int32)
        live = run >= 0
        weight_offset, state_row = row_of_run(runs, run, live, ROW_ALIGNMENT, ROW_UNIT)
        weight = load_tile(weights_ptr, weight_offset, live, DIM, BLOCK_D)  # [1, BLOCK_D]
        state = LOAD_STATE(states, state_row, weight_offset, live, DIM, BLOCK_D)
        count = tl.sum(run_pieces(runs, run, THRESHOLD, PIECE))
        span = 1
        while count > FAN_IN:
            count = (count + FAN_IN - 1) // FAN_IN
            span *= FAN_IN
        first = tl.load(long_runs.first_pieces + long_run)
        grad = add_slots(partials_ptr, first, span, count, partial_stride, DIM, BLOCK_D, SLOTS)
        update_rows(
            weights_ptr, states, stamp_ptr, weight, grad, state, weight_offset, state_row, live,
            UPDATE, DIM, BLOCK_D, STOCHASTIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_bucket"])
def apply_kernel(
    weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, ranges_ptr, first_bucket, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIMS: tl.constexpr, SLOTS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr, FAN_IN: tl.constexpr,
    ROW_ALIGNMENTS: tl.constexpr, ROW_UNIT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Some buckets, as in `grad_accum_kernel`."""
    for number in tl.static_range(len(DIMS)):
        if tl.program_id(1) == len(DIMS) - 1 - number:
            begin, end = bucket_range(ranges_ptr, first_bucket + number, LONG_RUNS)
            update_long_runs(
                weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, begin, end, partial_stride,
                LOAD_STATE, UPDATE, DIMS[number], SLOTS[number], THRESHOLD, PIECE, FAN_IN, ROW_ALIGNMENTS[number],
                ROW_UNIT, STOCHASTIC,
            )  # fmt: skip


@planned
def long_run_configs(spec: OperatorSpec) -> tuple[LongRunConfig, ...]:
    """Of each bucket. In all of them runs are cut into pieces alike."""
    configs = tuple(select_long_run(bucket.dim) for bucket in spec.layout.buckets)
    trees = {(config.threshold, config.piece_length, config.fan_in) for config in configs}
    assert len(trees) == 1, f"threshold, piece_length and fan_in must be the same for all dims, got {trees}"
    return configs


@planned
def plan_grad_accum(
    spec: OperatorSpec, target: Target, form: EntryForm, grad_alignments: tuple[int, ...]
) -> tuple[BucketLaunch, ...]:
    configs = long_run_configs(spec)

    def constants(group: slice) -> Constants:
        chosen, of_bucket = spec.layout.buckets[group], configs[group]
        return Constants(
            DIMS=tuple(bucket.dim for bucket in chosen),
            ROWS=tuple(config.rows_per_step for config in of_bucket),
            UNROLLS=tuple(config.unroll for config in of_bucket),
            THRESHOLD=of_bucket[0].threshold,
            PIECE=of_bucket[0].piece_length,
            GRAD_ALIGNMENTS=grad_alignments[group],
            SCALED=form.scaled,
            UNIT=form.unit,
            **launch_options(of_bucket[0].num_warps, registers_for(of_bucket[0].registers, chosen, spec)),
        )

    return bucket_launches(target, configs, constants, configs[0].pieces_per_program)


def grad_accum(
    *, partials: Tensor, grad_output: Tensor, grad_alignments: tuple[int, ...], entries: Entries, form: EntryForm,
    tables: RunTables, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Fill partials [pieces, at least dim] fp32 with the summed gradient of each piece."""
    max_pieces, partial_stride = partials.shape
    if max_pieces == 0:
        return
    for part in plan_grad_accum(spec, target_of(grad_output.device), form, grad_alignments):
        launch(
            grad_accum_kernel,
            part.grid(max_pieces),
            part.constants,
            first_bucket=part.first_bucket,
            partials_ptr=partials,
            grad_ptr=grad_output,
            entries=entries,
            runs=tables.runs,
            long_runs=tables.long_runs,
            ranges_ptr=tables.ranges,
            partial_stride=partial_stride,
        )


GROUPS_OF_A_MULTIPROCESSOR = 16  # of 64 registers and four warps 8 run at once; not tuned
MOST_WARPS = 16  # AMD's have 64 lanes, and a program at most 1024
WARPS_OF_A_GROUP = 4  # times those of a piece: groups are few, and have many slots each


@planned
def plan_add_groups(spec: OperatorSpec) -> Constants:
    config, widest = long_run_configs(spec)[-1], spec.layout.buckets[-1]
    return Constants(
        DIM=widest.dim,
        BLOCK_D=widest.block_dim,
        ROWS=WARPS_OF_A_GROUP * config.slots_per_step,
        THRESHOLD=config.threshold,
        PIECE=config.piece_length,
        FAN_IN=config.fan_in,
        num_warps=min(MOST_WARPS, WARPS_OF_A_GROUP * config.num_warps),
    )


def add_groups(*, partials: Tensor, tables: RunTables, spec: OperatorSpec) -> None:
    """All levels of the tree below the last, as many as a single run of all entries would need. Groups are few, so all
    buckets take part in one launch, each in all columns; those past its dim are never read."""
    fan_in = long_run_configs(spec)[-1].fan_in
    slots, span = partials.shape[0], 1
    assert slots <= 2**30, "the kernel counts pieces in int32, and its last step may go past the end"
    while slots > fan_in:
        slots = cdiv(slots, fan_in)
        launch(
            add_groups_kernel,
            fixed_grid(target_of(partials.device), GROUPS_OF_A_MULTIPROCESSOR, slots),
            plan_add_groups(spec),
            partials_ptr=partials,
            runs=tables.runs,
            long_runs=tables.long_runs,
            ranges_ptr=tables.ranges,
            num_buckets=len(spec.layout.buckets),
            span=span,
            partial_stride=partials.stride(0),
        )
        span *= fan_in


@planned
def plan_apply(spec: OperatorSpec, target: Target) -> tuple[BucketLaunch, ...]:
    optimizer, configs = OPTIMIZERS[spec.optimizer], long_run_configs(spec)

    def constants(group: slice) -> Constants:
        chosen, of_bucket = spec.layout.buckets[group], configs[group]
        return Constants(
            LOAD_STATE=optimizer.load_state,
            UPDATE=optimizer.update,
            DIMS=tuple(bucket.dim for bucket in chosen),
            SLOTS=tuple(config.slots_per_step for config in of_bucket),
            THRESHOLD=of_bucket[0].threshold,
            PIECE=of_bucket[0].piece_length,
            FAN_IN=of_bucket[0].fan_in,
            ROW_ALIGNMENTS=tuple(bucket.row_alignment for bucket in chosen),
            ROW_UNIT=spec.layout.row_unit,
            STOCHASTIC=spec.stochastic_rounding,
            num_warps=of_bucket[0].num_warps,
        )

    return bucket_launches(target, configs, constants, configs[0].runs_per_program)


def apply(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, partials: Tensor, tables: RunTables, spec: OperatorSpec
) -> None:
    """Update the rows of all long runs in place."""
    max_long = tables.long_runs.runs.numel()
    if max_long == 0:
        return
    for part in plan_apply(spec, target_of(weights.device)):
        launch(
            apply_kernel,
            part.grid(max_long),
            part.constants,
            first_bucket=part.first_bucket,
            weights_ptr=weights,
            states=states,
            stamp_ptr=stamp,
            partials_ptr=partials,
            runs=tables.runs,
            long_runs=tables.long_runs,
            ranges_ptr=tables.ranges,
            partial_stride=partials.stride(0),
        )
