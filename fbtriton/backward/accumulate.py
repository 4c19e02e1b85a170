"""Device functions: sum the gradients of runs, and update their rows."""

from __future__ import annotations

from collections.abc import Iterable

from fbtriton._triton import tl, triton
from fbtriton.backward.entries import load_entry
from fbtriton.layout import Bucket
from fbtriton.optim import STATES
from fbtriton.rows import load_tile, store_rows
from fbtriton.spec import OperatorSpec


@triton.jit
def sum_gradients(
    grad_ptr, entries, start, length,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum length[r] sorted entries from start[r] on, one after the other, with UNROLL of each under way at a time.
    start, length [R] -> [R, BLOCK_D] fp32"""
    total = tl.zeros([start.shape[0], BLOCK_D], tl.float32)
    for step in range(0, tl.max(length), UNROLL):
        for ahead in tl.static_range(UNROLL):
            slot = start + (step + ahead)  # [R]
            live = step + ahead < length
            offset, scale = load_entry(entries, slot, live, SCALED, UNIT)
            tile = load_tile(grad_ptr, tl.multiple_of(offset, [GRAD_ALIGNMENT]), live, DIM, BLOCK_D)
            if SCALED:
                tile *= scale[:, None]
            total += tile
    return total


@triton.jit
def sum_piece(
    grad_ptr, entries, begin, end,
    DIM: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    GRAD_ALIGNMENT: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sum the sorted entries begin to end - 1; each of ROWS lanes takes some neighbours. -> [1, BLOCK_D] fp32"""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    part = (end - begin + ROWS - 1) // ROWS
    start = begin + tl.arange(0, ROWS) * part  # [ROWS]
    length = tl.minimum(tl.maximum(end - start, 0), part)
    totals = sum_gradients(grad_ptr, entries, start, length, DIM, BLOCK_D, UNROLL, GRAD_ALIGNMENT, SCALED, UNIT)
    return tl.sum(totals, axis=0, keep_dims=True)


@triton.jit
def update_rows(
    weights_ptr, states, stamp_ptr, weight, grad, state, weight_offset, state_row, live,
    UPDATE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """One optimizer step for a tile of rows. weight, grad [R, BLOCK_D] fp32; weight_offset, state_row, live [R]"""
    updated = UPDATE(weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM, BLOCK_D)
    store_rows(weights_ptr, weight_offset, updated, state_row, stamp_ptr, live, DIM, BLOCK_D, STOCHASTIC)


def registers_for(configured: int | None, buckets: Iterable[Bucket], spec: OperatorSpec) -> int | None:
    """More than the configuration says where rows need several narrow loads or come with state of their own size: with
    fewer the loop would spill."""
    if configured is None:
        return None
    narrow = any(bucket.has_narrow_rows(spec.torch_weights_dtype.itemsize) for bucket in buckets)
    elementwise = sum(not state.rowwise for state in STATES[spec.optimizer])
    return configured + 64 * narrow + 32 * elementwise
