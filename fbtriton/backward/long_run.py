"""Long runs: grad_accum sums each piece into a slot of its own, apply adds a run's slots and updates its row.

Slots are added in the order of the run, so the result does not depend on which program summed what.
"""

from __future__ import annotations

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.accumulate import sum_gradients, update_rows
from fbtriton.backward.entries import EntryForm
from fbtriton.config import LongRunConfig, fixed_grid, target_of
from fbtriton.layout import Bucket, OperatorSpec, RunPieces, SortedRuns
from fbtriton.optim import OPTIMIZERS, OptimizerStates
from fbtriton.rows import load_tile


@triton.jit
def bucket_pieces(pieces, bucket_runs_ptr):
    """The range of the bucket's pieces."""
    begin = tl.load(pieces.piece_starts + tl.load(bucket_runs_ptr))
    return begin, tl.load(pieces.piece_starts + tl.load(bucket_runs_ptr + 1))


@triton.jit
def grad_accum_kernel(
    partials_ptr, grad_ptr, runs, pieces, bucket_runs_ptr, partial_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, GRAD_ALIGNMENT: tl.constexpr,
    SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    begin, end = bucket_pieces(pieces, bucket_runs_ptr)
    part: tl.constexpr = PIECE // ROWS  # each lane sums that many neighbours
    for piece in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        run = tl.load(pieces.piece_runs + piece)
        run_start = tl.load(runs.run_starts + run)
        run_end = tl.load(runs.run_starts + run + 1)
        start = run_start + (piece - tl.load(pieces.piece_starts + run)) * PIECE + tl.arange(0, ROWS) * part  # [ROWS]
        length = tl.minimum(tl.maximum(run_end - start, 0), part)
        total = tl.sum(
            sum_gradients(grad_ptr, runs.entries, start, length, DIM, BLOCK_D, GRAD_ALIGNMENT, SCALED, UNIT), axis=0
        )
        column = tl.arange(0, BLOCK_D)
        slot = piece + tl.zeros([1], tl.int64)  # wide before the product
        tl.store(partials_ptr + slot * partial_stride + column, total, mask=column < DIM)


@triton.jit
def apply_kernel(
    weights_ptr, states, stamp_ptr, partials_ptr, pieces, bucket_runs_ptr, partial_stride,
    LOAD_STATE: tl.constexpr, UPDATE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ROW_ALIGNMENT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    begin, end = bucket_pieces(pieces, bucket_runs_ptr)
    for piece in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        run = tl.load(pieces.piece_runs + piece)
        if tl.load(pieces.piece_starts + run) == piece:  # the run's first piece does the work of the run
            count = tl.load(pieces.piece_starts + run + 1) - piece
            one_run = run + tl.zeros([1], tl.int32)
            live = one_run >= 0
            weight_offset = tl.multiple_of(tl.load(pieces.weight_offsets + one_run), [ROW_ALIGNMENT])
            state_row = tl.load(pieces.state_rows + one_run)
            weight = load_tile(weights_ptr, weight_offset, live, DIM, BLOCK_D)  # [1, BLOCK_D]
            state = LOAD_STATE(states, state_row, live)
            total = tl.zeros([ROWS, BLOCK_D], tl.float32)
            for step in range(0, count, ROWS):
                number = step + tl.arange(0, ROWS)
                offset = (piece + number).to(tl.int64) * partial_stride
                total += load_tile(partials_ptr, offset, number < count, DIM, BLOCK_D)
            grad = tl.sum(total, axis=0, keep_dims=True)
            update_rows(
                weights_ptr, states, stamp_ptr, weight, grad, state, weight_offset, state_row, live,
                UPDATE, DIM, BLOCK_D, STOCHASTIC,
            )  # fmt: skip


def grad_accum(
    *, partials: Tensor, grad_output: Tensor, grad_alignment: int, form: EntryForm, runs: SortedRuns, pieces: RunPieces,
    bucket: Bucket, bucket_number: int, config: LongRunConfig,
) -> None:  # fmt: skip
    """Fill partials [pieces, at least dim] fp32 with the summed gradient of each piece of one bucket."""
    programs = config.programs_per_multiprocessor
    grad_accum_kernel[fixed_grid(target_of(grad_output.device), programs, partials.shape[0])](
        partials_ptr=partials,
        grad_ptr=grad_output,
        runs=runs,
        pieces=pieces,
        bucket_runs_ptr=pieces.bucket_runs[bucket_number:],
        partial_stride=partials.stride(0),
        DIM=bucket.dim,
        BLOCK_D=bucket.block_dim,
        ROWS=config.rows_per_step,
        PIECE=config.piece_length,
        GRAD_ALIGNMENT=grad_alignment,
        SCALED=form.scaled,
        UNIT=form.unit,
        num_warps=config.num_warps,
    )


def apply(
    *, weights: Tensor, states: OptimizerStates, stamp: Tensor, partials: Tensor, pieces: RunPieces,
    bucket: Bucket, bucket_number: int, config: LongRunConfig, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Update the rows of one bucket's long runs in place."""
    optimizer = OPTIMIZERS[spec.optimizer]
    programs = config.programs_per_multiprocessor
    apply_kernel[fixed_grid(target_of(weights.device), programs, partials.shape[0])](
        weights_ptr=weights,
        states=states,
        stamp_ptr=stamp,
        partials_ptr=partials,
        pieces=pieces,
        bucket_runs_ptr=pieces.bucket_runs[bucket_number:],
        partial_stride=partials.stride(0),
        LOAD_STATE=optimizer.load_state,
        UPDATE=optimizer.update,
        DIM=bucket.dim,
        BLOCK_D=bucket.block_dim,
        ROWS=config.rows_per_step,
        ROW_ALIGNMENT=bucket.row_alignment,
        STOCHASTIC=spec.stochastic_rounding,
        num_warps=config.num_warps,
    )
