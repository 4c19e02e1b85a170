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
from fbtriton.backward.accumulate import registers_for, sum_gradients, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.runs import GROUPS, KINDS, LONG_RUNS, PIECES, bucket_range, num_buckets
from fbtriton.config import LongRunConfig, target_of
from fbtriton.launch import bucket_grid, cdiv, fixed_grid, launch, launch_groups, launch_options
from fbtriton.layout import Entries, RunTables
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile
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
def sum_pieces(
    partials_ptr, grad_ptr, entries, pieces, begin, end, partial_stride,
    DIM: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, UNROLL: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """This program's share of the pieces begin to end - 1."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    part: tl.constexpr = PIECE // ROWS  # each lane sums that many neighbours
    for piece in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        start = tl.load(pieces.starts + piece) + tl.arange(0, ROWS) * part  # [ROWS]
        length = tl.minimum(tl.maximum(tl.load(pieces.ends + piece) - start, 0), part)
        totals = sum_gradients(
            grad_ptr, entries, start, length, DIM, BLOCK_D, UNROLL, GRAD_ALIGNMENT, SCALED, UNIT
        )  # fmt: skip
        store_slot(partials_ptr, piece, partial_stride, tl.sum(totals, axis=0, keep_dims=True), DIM, BLOCK_D)


@triton.jit(do_not_specialize=["first_bucket"])
def grad_accum_kernel(
    partials_ptr, grad_ptr, entries, pieces, ranges_ptr, first_bucket, partial_stride,
    DIMS: tl.constexpr, ROWS: tl.constexpr, UNROLLS: tl.constexpr, PIECE: tl.constexpr,
    GRAD_ALIGNMENTS: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Some buckets, with a constant for each in every tuple; programs with the wide rows start first."""
    for number in tl.static_range(len(DIMS)):
        if tl.program_id(1) == len(DIMS) - 1 - number:
            begin, end = bucket_range(ranges_ptr, first_bucket + number, PIECES)
            sum_pieces(
                partials_ptr, grad_ptr, entries, pieces, begin, end, partial_stride,
                DIMS[number], ROWS[number], PIECE, UNROLLS[number], GRAD_ALIGNMENTS[number], SCALED, UNIT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_buckets", "span"])
def add_groups_kernel(
    partials_ptr, groups, ranges_ptr, num_buckets, span, partial_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, FAN_IN: tl.constexpr,
):  # fmt: skip
    for group in range(tl.program_id(0), tl.load(ranges_ptr + num_buckets * KINDS + GROUPS), tl.num_programs(0)):
        number = tl.load(groups.numbers + group)
        left = tl.load(groups.pieces_left + group)
        slots = (left + number * FAN_IN + span - 1) // span  # of the run, on this level; apply adds up to FAN_IN
        count = tl.minimum((left + span - 1) // span, FAN_IN)
        if (number % span == 0) & (slots > FAN_IN) & (count > 1):
            first = tl.load(groups.first_pieces + group)
            total = add_slots(partials_ptr, first, span, count, partial_stride, DIM, BLOCK_D, ROWS)
            tl.debug_barrier()  # the first slot is read before it is written
            store_slot(partials_ptr, first, partial_stride, total, DIM, BLOCK_D)


@triton.jit
def update_long_runs(
    weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, begin, end, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, FAN_IN: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """This program's share of the long runs begin to end - 1."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    for long_run in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        run = tl.load(long_runs.runs + long_run) + tl.zeros([1], tl.int32)
        live = run >= 0
        weight_offset = tl.multiple_of(tl.load(runs.weight_offsets + run), [ROW_ALIGNMENT])
        state_row = tl.load(runs.state_rows + run)
        weight = load_tile(weights_ptr, weight_offset, live, DIM, BLOCK_D)  # [1, BLOCK_D]
        state = LOAD_STATE(states, state_row, weight_offset, live, DIM, BLOCK_D)
        length = tl.sum(tl.load(runs.run_starts + run + 1) - tl.load(runs.run_starts + run))
        count = (length + PIECE - 1) // PIECE
        span = 1
        while count > FAN_IN:
            count = (count + FAN_IN - 1) // FAN_IN
            span *= FAN_IN
        first = tl.load(long_runs.first_pieces + long_run)
        grad = add_slots(partials_ptr, first, span, count, partial_stride, DIM, BLOCK_D, ROWS)
        update_rows(
            weights_ptr, states, stamp_ptr, weight, grad, state, weight_offset, state_row, live,
            UPDATE, DIM, BLOCK_D, STOCHASTIC,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_bucket"])
def apply_kernel(
    weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, ranges_ptr, first_bucket, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIMS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, FAN_IN: tl.constexpr,
    ROW_ALIGNMENTS: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Some buckets, as in `grad_accum_kernel`."""
    for number in tl.static_range(len(DIMS)):
        if tl.program_id(1) == len(DIMS) - 1 - number:
            begin, end = bucket_range(ranges_ptr, first_bucket + number, LONG_RUNS)
            update_long_runs(
                weights_ptr, states, stamp_ptr, partials_ptr, runs, long_runs, begin, end, partial_stride,
                LOAD_STATE, UPDATE, DIMS[number], ROWS[number], PIECE, FAN_IN, ROW_ALIGNMENTS[number], STOCHASTIC,
            )  # fmt: skip


def grad_accum(
    *, partials: Tensor, grad_output: Tensor, grad_alignments: list[int], entries: Entries, form: EntryForm,
    tables: RunTables, configs: list[LongRunConfig], spec: OperatorSpec,
) -> None:  # fmt: skip
    """Fill partials [pieces, at least dim] fp32 with the summed gradient of each piece. configs: of each bucket."""
    if partials.shape[0] == 0:
        return
    target = target_of(grad_output.device)
    for group in launch_groups(configs):
        of_bucket = [configs[b] for b in group]
        chosen = [spec.layout.buckets[b] for b in group]
        registers = registers_for(of_bucket[0].registers, chosen, spec)
        launch(
            grad_accum_kernel,
            bucket_grid(target, of_bucket[0], partials.shape[0], len(group)),
            partials_ptr=partials,
            grad_ptr=grad_output,
            entries=entries,
            pieces=tables.pieces,
            ranges_ptr=tables.ranges,
            first_bucket=group.start,
            partial_stride=partials.stride(0),
            DIMS=tuple(bucket.dim for bucket in chosen),
            ROWS=tuple(config.rows_per_step for config in of_bucket),
            UNROLLS=tuple(config.unroll for config in of_bucket),
            PIECE=of_bucket[0].piece_length,
            GRAD_ALIGNMENTS=tuple(grad_alignments[b] for b in group),
            SCALED=form.scaled,
            UNIT=form.unit,
            **launch_options(of_bucket[0].num_warps, registers),
        )


def add_groups(*, partials: Tensor, tables: RunTables, block_dim: int, config: LongRunConfig) -> None:
    """All levels of the tree below the last, as many as a single run of all entries would need. Groups are few, so all
    buckets take part in one launch, each in all columns; those past its dim are never read.

    Args:
        block_dim: `Bucket.block_dim` of the widest bucket.
    """
    max_groups = tables.groups.numbers.numel()
    slots, span = partials.shape[0], 1
    while slots > config.fan_in and max_groups:
        launch(
            add_groups_kernel,
            fixed_grid(target_of(partials.device), config.programs_per_multiprocessor, max_groups),
            partials_ptr=partials,
            groups=tables.groups,
            ranges_ptr=tables.ranges,
            num_buckets=num_buckets(tables),
            span=span,
            partial_stride=partials.stride(0),
            DIM=partials.shape[1],
            BLOCK_D=block_dim,
            ROWS=config.slots_per_step,
            FAN_IN=config.fan_in,
            num_warps=config.num_warps,
        )
        slots, span = cdiv(slots, config.fan_in), span * config.fan_in


def apply(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, partials: Tensor, tables: RunTables,
    configs: list[LongRunConfig], spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of all long runs in place. configs: of each bucket."""
    optimizer = OPTIMIZERS[spec.optimizer]
    max_long = tables.long_runs.runs.numel()
    if max_long == 0:
        return
    target = target_of(weights.device)
    for group in launch_groups(configs):
        of_bucket = [configs[b] for b in group]
        chosen = [spec.layout.buckets[b] for b in group]
        launch(
            apply_kernel,
            bucket_grid(target, of_bucket[0], max_long, len(group)),
            weights_ptr=weights,
            states=states,
            stamp_ptr=stamp,
            partials_ptr=partials,
            runs=tables.runs,
            long_runs=tables.long_runs,
            ranges_ptr=tables.ranges,
            first_bucket=group.start,
            partial_stride=partials.stride(0),
            LOAD_STATE=optimizer.load_state,
            UPDATE=optimizer.update,
            DIMS=tuple(bucket.dim for bucket in chosen),
            ROWS=tuple(config.slots_per_step for config in of_bucket),
            PIECE=of_bucket[0].piece_length,
            FAN_IN=of_bucket[0].fan_in,
            ROW_ALIGNMENTS=tuple(bucket.row_alignment for bucket in chosen),
            STOCHASTIC=spec.stochastic_rounding,
            num_warps=of_bucket[0].num_warps,
        )
