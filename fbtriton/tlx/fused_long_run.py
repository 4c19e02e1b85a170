"""Long runs in one launch: whoever completes a run updates its row.

A program sums a piece and stores the partial gradient in the piece's slot; then it counts itself in at the group of
slots that the piece belongs to. The last one to arrive adds the group's slots into the first of them and counts itself
in one level up, and so on; the last one of all applies the optimizer. Nobody waits for anybody. Every sum has one
order, and so the result is the same to the bit whoever arrives last. The tree is that of `backward.long_run`, but there
more slots of a group are under way at a time, and so they are added in another order; and the optimizer's update is
compiled once more here, where the compiler may fuse other multiplications and additions, or add a row's squares in
another order. So the last bits of a weight may differ from those there.

Example, a run of 7 pieces, fan-in 2; who is last among a group goes on:

    level 0, span 1    (0 1) (2 3) (4 5) (6)       6 has nobody to wait for
    level 1, span 2    (01 23)   (45 6)
    level 2, span 4    (0123 456)                  the last one updates the row

    counter of a group: that of the first piece of its second child: 1 3 5, 2 6, 4. No two groups share one, because
    the number of the lowest digit, in base fan-in, that is not zero is the level. The counters are zeroed before each
    launch, so a launch that failed or a replayed graph finds no trace of earlier ones.

With REDUCE all partial gradients of a run are added into one row by TMA, in the order in which they arrive, and one
counter stands for the run. That is not deterministic, and has to be chosen.

Why the last one sees what the others wrote. Writer W and last arriver L are programs; PTX as compiled for sm_100:

    W  st.global, all threads                              the partial gradient
    W  bar.sync (or bar.warp.sync)                         (1) orders it before what thread 0 does next
    W  atom.acq_rel.gpu.global.add by thread 0             (2) releases, cumulatively: (1) is part of it
    L  atom.acq_rel.gpu.global.add by thread 0             (3) reads from (2), or from a later atom of the same chain of
                                                               read-modify-writes, and acquires
    L  bar.sync                                            (4) orders (3) before the loads of all threads
    L  ld.global, all threads; never ld.global.nc          the partial gradient of W

Without barrier (1) only the stores of thread 0 would be released: Triton puts none before an atomic. Barrier (4) stands
in the code too and does not rely on how Triton hands the result of an atomic to the other threads. If L then writes
slots, barriers separate its loads from its stores, and it goes through (1) to (4) as the writer of the next level.

With REDUCE, W's first line is asynchronous:

    W  st.shared, all threads; fence.proxy.async; bar.sync  the tile is there for the asynchronous proxy
    W  cp.reduce.async.bulk.tensor, commit_group            by one thread
    W  cp.async.bulk.wait_group.read 0                      shared memory may be written again; says no more than that
    W  cp.async.bulk.wait_group 0                           (0) the sums are in global memory, as seen by that thread
    W  fence.proxy.async                                    they precede its generic operations
    W  (1), (2) as above
    L  (3), (4) as above, then ld.global                    the row, complete
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import registers_for, sum_piece, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.long_run import add_slots, find_run, long_run_configs, store_slot
from fbtriton.backward.runs import (
    KINDS,
    LONG_RUNS,
    PIECES,
    bucket_range,
    count_pieces,
    most_pieces,
    piece_bounds,
    row_of_run,
)
from fbtriton.config import FusedConfig, target_of
from fbtriton.launch import fixed_grid, launch_options
from fbtriton.layout import Bucket, Entries, RunTables
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile
from fbtriton.spec import OperatorSpec
from fbtriton.tlx import language
from fbtriton.tlx.work_queue import REVISION, answer, ask, open_queue

tlx = language()


@triton.jit
def arrive(counter_ptr, expected):
    """Whether this program is the last of those expected; if so, it sees what all of them wrote."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == expected - 1


@triton.jit
def climb(
    partials_ptr, arrivals_ptr, first, number, count, partial_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, FAN_IN: tl.constexpr,
):  # fmt: skip
    """Add up every group that this program is the last to arrive at. Piece `number` of `count` is in its slot; the
    run's slots and counters start at `first`. -> whether the run is complete, and then span and number of the slots
    that are left to add"""
    span = 1
    node = number
    slots = count
    complete = count == 1
    rising = count > 1
    while rising:
        node = node // FAN_IN
        group = first + node * FAN_IN * span
        children = tl.minimum(slots - node * FAN_IN, FAN_IN)
        last = children == 1
        if children > 1:
            last = arrive(arrivals_ptr + group + span, children)
        complete = last & (slots <= FAN_IN)
        rising = last & (slots > FAN_IN)
        if rising:
            if children > 1:
                total = add_slots(partials_ptr, group, span, children, partial_stride, DIM, BLOCK_D, ROWS)
                tl.debug_barrier()  # the first slot is read before it is written
                store_slot(partials_ptr, group, partial_stride, total, DIM, BLOCK_D)
            span = span * FAN_IN
            slots = (slots + FAN_IN - 1) // FAN_IN
    return complete, span, slots


@triton.jit
def reduce_row(rows_desc, row, value, BLOCK_D: tl.constexpr):
    """Add value [1, BLOCK_D] to a row in global memory, and wait until it is there."""
    buffer = tlx.local_alloc((1, BLOCK_D), tl.float32, 1)
    tlx.local_store(buffer[0], value)
    tlx.fence("async_shared")
    tl.debug_barrier()
    tlx.async_descriptor_store(rows_desc, buffer[0], [row, 0], store_reduce="add")
    tlx.async_descriptor_store_wait(0)
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;", "=r,r", [row], tl.int32, False, 1
    )


@triton.jit(do_not_specialize=["bucket"])
def fused_long_run_kernel(
    weights_ptr, states, stamp_ptr, partials_ptr, rows_desc,
    grad_ptr, entries, runs, long_runs, arrivals_ptr, ranges_ptr, bucket, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
    FAN_IN: tl.constexpr, UNROLL: tl.constexpr, ROW_ALIGNMENT: tl.constexpr, ROW_UNIT: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr, STOCHASTIC: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
    SLOTS: tl.constexpr, CLC: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    begin, end = bucket_range(ranges_ptr, bucket, PIECES)
    first_long, last_long = bucket_range(ranges_ptr, bucket, LONG_RUNS)
    queue = open_queue(CLC, REVISION)
    tile = tl.program_id(0)
    phase = 0
    while tile >= 0:
        ask(queue)
        for piece in range(begin + tile, end, tl.num_programs(0)):
            long_run, first, run_start, run_end = find_run(runs, long_runs, first_long, last_long, piece)
            run = tl.load(long_runs.runs + long_run) + tl.zeros([1], tl.int32)
            count = count_pieces(run_start, run_end, THRESHOLD, PIECE)
            piece_start, piece_end = piece_bounds(run_start, run_end, piece - first, THRESHOLD, PIECE)
            grad = sum_piece(
                grad_ptr, entries, piece_start, piece_end, DIM, ROWS, UNROLL, GRAD_ALIGNMENT, SCALED, UNIT
            )  # fmt: skip
            alone = count == 1
            if REDUCE:
                complete = alone
                if not alone:
                    reduce_row(rows_desc, long_run, grad, BLOCK_D)
                    complete = arrive(arrivals_ptr + first, count)
            else:
                if not alone:
                    store_slot(partials_ptr, piece, partial_stride, grad, DIM, BLOCK_D)
                complete, span, slots = climb(
                    partials_ptr, arrivals_ptr, first, piece - first, count, partial_stride,
                    DIM, BLOCK_D, SLOTS, FAN_IN,
                )  # fmt: skip
            if complete:
                live = run >= 0
                weight_offset, state_row = row_of_run(runs, run, live, ROW_ALIGNMENT, ROW_UNIT)
                weight = load_tile(weights_ptr, weight_offset, live, DIM, BLOCK_D)
                state = LOAD_STATE(states, state_row, weight_offset, live, DIM, BLOCK_D)
                if REDUCE:
                    row = (run * 0 + long_run).to(tl.int64)
                    total = load_tile(partials_ptr, row * partial_stride, live & (count > 1), DIM, BLOCK_D)
                else:
                    left = tl.where(alone, 0, slots)
                    total = add_slots(partials_ptr, first, span, left, partial_stride, DIM, BLOCK_D, SLOTS)
                update_rows(
                    weights_ptr, states, stamp_ptr, weight, tl.where(alone, grad, total), state, weight_offset,
                    state_row, live, UPDATE, DIM, BLOCK_D, STOCHASTIC,
                )  # fmt: skip
        tile = answer(queue, phase)
        phase ^= 1


@triton.jit(do_not_specialize=["num_buckets"])
def clear_rows_kernel(partials_ptr, ranges_ptr, num_buckets, partial_stride, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Zero the row of every long run."""
    for row in range(tl.program_id(0), tl.load(ranges_ptr + num_buckets * KINDS + LONG_RUNS), tl.num_programs(0)):
        store_slot(partials_ptr, row, partial_stride, tl.zeros([1, BLOCK_D], tl.float32), DIM, BLOCK_D)


def empty_partials(tables: RunTables, max_pieces: int, max_dim: int, reduce: bool) -> Tensor:
    """A slot for each piece, or a row for each long run. A TMA box starts at multiples of 16 bytes."""
    rows = tables.long_runs.runs.numel() if reduce else max_pieces
    return tables.ranges.new_empty((rows, -(-max_dim // 4) * 4), dtype=torch.float32)


def fused_long_run(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, grad_output: Tensor, grad_alignments: tuple[int, ...],
    entries: Entries, form: EntryForm, tables: RunTables, config: FusedConfig, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of all long runs in place, one launch for each bucket."""
    long_runs = long_run_configs(spec)
    max_pieces = most_pieces(entries.payload.numel(), spec.layout.no_key, long_runs[0])
    if max_pieces == 0:
        return
    target, optimizer, buckets = target_of(weights.device), OPTIMIZERS[spec.optimizer], spec.layout.buckets
    partials = empty_partials(tables, max_pieces, max(spec.layout.dims), config.reduce)
    arrivals = tables.ranges.new_zeros(max_pieces)
    if config.reduce:
        clear_rows_kernel[fixed_grid(target, config.programs_per_multiprocessor, partials.shape[0])](
            partials_ptr=partials,
            ranges_ptr=tables.ranges,
            num_buckets=len(buckets),
            partial_stride=partials.stride(0),
            DIM=partials.shape[1],
            BLOCK_D=buckets[-1].block_dim,
            num_warps=long_runs[-1].num_warps,
        )
    grid = fixed_grid(target, config.programs_per_multiprocessor, max_pieces)
    for number, (bucket, long_run) in enumerate(zip(buckets, long_runs, strict=True)):
        fused_long_run_kernel[grid](
            weights_ptr=weights,
            states=states,
            stamp_ptr=stamp,
            partials_ptr=partials,
            rows_desc=_rows_descriptor(partials, bucket) if config.reduce else None,
            grad_ptr=grad_output,
            entries=entries,
            runs=tables.runs,
            long_runs=tables.long_runs,
            arrivals_ptr=arrivals,
            ranges_ptr=tables.ranges,
            bucket=number,
            partial_stride=partials.stride(0),
            LOAD_STATE=optimizer.load_state,
            UPDATE=optimizer.update,
            DIM=bucket.dim,
            BLOCK_D=bucket.block_dim,
            ROWS=long_run.rows_per_step,
            SLOTS=long_run.slots_per_step,
            THRESHOLD=long_run.threshold,
            PIECE=long_run.piece_length,
            FAN_IN=long_run.fan_in,
            UNROLL=long_run.unroll,
            ROW_ALIGNMENT=bucket.row_alignment,
            ROW_UNIT=spec.layout.row_unit,
            GRAD_ALIGNMENT=grad_alignments[number],
            STOCHASTIC=spec.stochastic_rounding,
            SCALED=form.scaled,
            UNIT=form.unit,
            CLC=config.clc,
            REDUCE=config.reduce,
            **launch_options(long_run.num_warps, registers_for(long_run.registers, [bucket], spec)),
        )


def _rows_descriptor(partials: Tensor, bucket: Bucket) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape = [partials.shape[0], bucket.dim]  # columns past the dim are not written
    return TensorDescriptor(partials, shape, list(partials.stride()), [1, bucket.block_dim])
