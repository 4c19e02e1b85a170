"""The backward for small tables that the forward has counted: no sort, no look at the ids.

    gradient[row, :] = sum over bags of counts[bag, row] * grad_output[bag, :]      counts transposed times gradient

A program multiplies a chunk of neighbouring bags on the tensor cores and stores its sum into a slot of its own; a
second launch adds the slots of each row in their order and applies the optimizer.

Error: as in `fbtriton.forward.histogram`. Counts are exact; fp16 gradients are multiplied as they are, bf16 ones as
tf32, which holds them exactly, fp32 ones in two tf32 parts, which leaves 2^-21 of a gradient. So a sum differs from
that of the sorted path by its order of additions and, for fp32, by at most 2^-21 of the sum of magnitudes. Chunks with
a count that did not fit its byte, or whose sum is NaN, are added up again bag by bag in fp32, so a gradient that is
not finite reaches only the rows of its bag.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import update_rows
from fbtriton.backward.long_run import add_slots
from fbtriton.config import select_histogram
from fbtriton.forward.histogram import BLOCK_BINS, COUNT_OVERFLOW, count_bag, multiply_counts
from fbtriton.forward.routing import CountedTables
from fbtriton.launch import cdiv, launch
from fbtriton.layout import Bags
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import bag_bounds, load_tile, mean_factor, store_tile, tile_mask, tile_pointer
from fbtriton.spec import OperatorSpec

APPLY_ROWS = 16  # slots that are added at once


@triton.jit
def sum_bag_by_bag(
    grad_ptr, bags, feature, table_rows, first, end, batch_size, num_entries, grad_stride, column, first_row,
    first_column,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BINS: tl.constexpr, IDS: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """The gradients of the rows from first_row on, of the bags first to end - 1, exact to fp32. [BINS, BLOCK_D]"""
    total = tl.zeros([BINS, BLOCK_D], tl.float32)
    for sample in range(first, end):
        begin, length = bag_bounds(bags.offsets, feature * batch_size + sample, num_entries)
        counts = count_bag(bags.indices, begin, length, table_rows, first_row, IDS, BINS, True)[:, None]
        offset = (sample + tl.zeros([1], tl.int64)) * grad_stride + column
        grad = load_tile(grad_ptr, offset, offset >= 0, DIM, BLOCK_D, first_column)  # [1, BLOCK_D]
        if MEAN:
            grad *= mean_factor(length)
        total += tl.where(counts > 0, counts.to(tl.float32) * grad, 0.0)
    return total


@triton.jit(do_not_specialize=["batch_size", "num_entries", "chunk", "num_chunks"])
def multiply_gradients_kernel(
    partials_ptr, seen_ptr,
    grad_ptr, counts_ptr, feature_list_ptr, counts_number_ptr, features, bags,
    batch_size, num_entries, grad_stride, chunk, num_chunks,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BINS: tl.constexpr, BLOCK_BINS: tl.constexpr, BAGS: tl.constexpr,
    IDS: tl.constexpr, MEAN: tl.constexpr, GRAD_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """partials [features of the list, num_chunks, BINS, DIM] fp32; seen [the same without DIM] uint8, not 0 where a bag
    of the chunk has the row. counts_number [features of the list]: where a feature stands in the counts."""
    number = tl.program_id(0) // num_chunks
    first = (tl.program_id(0) % num_chunks) * chunk
    first_column = tl.program_id(1) * BLOCK_D
    row = tl.program_id(2) * BLOCK_BINS + tl.arange(0, BLOCK_BINS)  # [BLOCK_BINS]
    feature = tl.load(feature_list_ptr + number)
    column = tl.multiple_of(tl.load(features.column + feature), GRAD_ALIGNMENT)
    counts_row = tl.load(counts_number_ptr + number) * batch_size
    end = tl.minimum(first + chunk, batch_size)
    total = tl.zeros([BLOCK_BINS, BLOCK_D], tl.float32)
    highest = tl.zeros([BLOCK_BINS], tl.int32)
    for start in range(first, end, BAGS):
        sample = (start + tl.arange(0, BAGS)).to(tl.int64)  # [BAGS]
        live = sample < end
        place = (counts_row + sample)[:, None] * BINS + row[None, :]
        counts = tl.load(counts_ptr + place, mask=live[:, None], other=0)  # [BAGS, BLOCK_BINS]
        highest = tl.maximum(highest, tl.max(counts.to(tl.int32), axis=0))
        offset = tl.multiple_of(sample * grad_stride + column, [GRAD_ALIGNMENT])
        pointer = tile_pointer(grad_ptr, offset, BLOCK_D, first_column)
        grad = tl.load(pointer, mask=tile_mask(live, DIM, BLOCK_D, first_column), other=0.0)
        if MEAN:
            _, length = bag_bounds(bags.offsets, feature * batch_size + tl.where(live, sample, 0), num_entries)
            grad = grad.to(tl.float32) * mean_factor(length)[:, None]
        total = multiply_counts(tl.trans(counts), grad, total)
    mark = tl.sum(total)
    if (tl.max(highest) == COUNT_OVERFLOW) | (mark != mark):
        table_rows = tl.load(features.rows + feature)
        total = sum_bag_by_bag(
            grad_ptr, bags, feature, table_rows, first, end, batch_size, num_entries, grad_stride, column,
            tl.program_id(2) * BLOCK_BINS, first_column, DIM, BLOCK_D, BLOCK_BINS, IDS, MEAN,
        )  # fmt: skip
    slot = tl.program_id(0).to(tl.int64) * BINS + row
    store_tile(partials_ptr, slot * DIM, total, row >= 0, DIM, BLOCK_D, first_column)
    if first_column == 0:
        tl.store(seen_ptr + slot, tl.minimum(highest, 1).to(tl.uint8))


@triton.jit
def was_seen(seen_ptr, first, span, count, ROWS: tl.constexpr):
    """Whether one of the slots first, first + span, ..., count of them, saw its row. -> [1]"""
    seen = tl.zeros([ROWS], tl.int32)
    for step in range(0, count, ROWS):
        number = step + tl.arange(0, ROWS).to(tl.int64)
        seen |= tl.load(seen_ptr + first + number * span, mask=number < count, other=0).to(tl.int32)
    return tl.max(seen, axis=0, keep_dims=True) > 0


@triton.jit(do_not_specialize=["num_chunks"])
def apply_counted_kernel(
    weights_ptr, states, stamp_ptr, step_ptr, partials_ptr, seen_ptr,
    feature_list_ptr, first_numbers_ptr, state_bases_ptr, features, num_chunks,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, ROW_ALIGNMENT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Programs (row, table) update one row each. The features first_numbers[table] to first_numbers[table + 1] - 1 of
    the list share the table. step_ptr None = the sorted path advances the step of stochastic rounding."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    row = tl.program_id(0)
    table = tl.program_id(1)
    if step_ptr is not None:
        if (row == 0) & (table == 0):
            tl.store(step_ptr, tl.load(step_ptr) + 1)
    number = tl.load(first_numbers_ptr + table)
    feature = tl.load(feature_list_ptr + number)
    if row < tl.load(features.rows + feature):
        first = number * num_chunks * BINS + row
        count = (tl.load(first_numbers_ptr + table + 1) - number) * num_chunks
        live = was_seen(seen_ptr, first, BINS, count, ROWS)  # [1]
        offset = tl.load(features.weight_offset + feature) + row * DIM + tl.zeros([1], tl.int64)
        offset = tl.multiple_of(offset, [ROW_ALIGNMENT])
        state_row = tl.load(state_bases_ptr + table) + row + tl.zeros([1], tl.int64)
        weight = load_tile(weights_ptr, offset, live, DIM, BLOCK_D)  # [1, BLOCK_D]
        state = LOAD_STATE(states, state_row, offset, live, DIM, BLOCK_D)
        grad = add_slots(partials_ptr, first, BINS, count, DIM, DIM, BLOCK_D, ROWS)
        update_rows(
            weights_ptr, states, stamp_ptr, weight, grad, state, offset, state_row, live,
            UPDATE, DIM, BLOCK_D, STOCHASTIC,
        )  # fmt: skip


def histogram(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, step: Tensor | None, grad_output: Tensor,
    grad_alignments: tuple[int, ...], counts: Tensor, bags: Bags, tables: tuple[CountedTables, ...], spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of some tables in place, in two launches for each dim.

    Args:
        step: of stochastic rounding, [1] int64; advanced. None = the sorted path does it.
        counts: [counted features, B, bins] uint8 of the forward.
    """
    config = select_histogram()
    layout, device = spec.layout, weights.device
    features = layout.on_device(device).features
    optimizer = OPTIMIZERS[spec.optimizer]
    _, batch_size, bins = counts.shape
    num_chunks = cdiv(batch_size, config.grad_chunk)
    block_bins = min(bins, BLOCK_BINS)
    for part in tables:
        bucket = part.bucket
        slots = len(part.features) * num_chunks * bins
        partials = torch.empty(slots * bucket.dim, dtype=torch.float32, device=device)
        seen = torch.empty(slots, dtype=torch.uint8, device=device)
        feature_list = layout.numbers_on_device(part.features, device)
        columns = min(bucket.block_dim, config.grad_columns)
        grid = (len(part.features) * num_chunks, cdiv(bucket.dim, columns), bins // block_bins)
        launch(
            multiply_gradients_kernel,
            grid,
            partials_ptr=partials,
            seen_ptr=seen,
            grad_ptr=grad_output,
            counts_ptr=counts,
            feature_list_ptr=feature_list,
            counts_number_ptr=layout.numbers_on_device(part.numbers, device),
            features=features,
            bags=bags,
            batch_size=batch_size,
            num_entries=bags.indices.numel(),
            grad_stride=grad_output.stride(0),
            chunk=config.grad_chunk,
            num_chunks=num_chunks,
            DIM=bucket.dim,
            BLOCK_D=columns,
            BINS=bins,
            BLOCK_BINS=block_bins,
            BAGS=config.grad_bags,
            IDS=config.ids,
            MEAN=spec.mean,
            GRAD_ALIGNMENT=grad_alignments[layout.buckets.index(bucket)],
            num_warps=config.grad_warps,
        )
        launch(
            apply_counted_kernel,
            (part.max_rows, len(part.state_bases)),
            weights_ptr=weights,
            states=states,
            stamp_ptr=stamp,
            step_ptr=step,
            partials_ptr=partials,
            seen_ptr=seen,
            feature_list_ptr=feature_list,
            first_numbers_ptr=layout.numbers_on_device(part.first_numbers, device),
            state_bases_ptr=layout.numbers_on_device(part.state_bases, device),
            features=features,
            num_chunks=num_chunks,
            LOAD_STATE=optimizer.load_state,
            UPDATE=optimizer.update,
            DIM=bucket.dim,
            BINS=bins,
            ROWS=APPLY_ROWS,
            ROW_ALIGNMENT=bucket.row_alignment,
            STOCHASTIC=spec.stochastic_rounding,
            num_warps=1,
        )
        step = None
