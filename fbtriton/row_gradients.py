"""The operator without an optimizer: its backward gives the weights a sparse gradient and changes nothing.

The stages are those of any backward. Where an optimizer would store new rows into the weights, gradients go into
slots, one for each run, and the runs' rows become the indices of the sparse tensor.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fbtriton.backward import backward
from fbtriton.batch import BatchShape
from fbtriton.layout import Bags, RowGradients, VbeLayout
from fbtriton.spec import OperatorSpec


def empty_row_gradients(weights: Tensor, num_entries: int, spec: OperatorSpec) -> RowGradients:
    """As many slots as a batch of num_entries ids could need. weights [rows, dim]"""
    slots = min(num_entries, weights.shape[0])
    return RowGradients(
        values=weights.new_zeros(slots, weights.shape[1]),
        rows=torch.zeros(slots, dtype=torch.int64, device=weights.device),
        filled=torch.zeros(1, dtype=torch.int64, device=weights.device),
    )


def as_sparse(gradients: RowGradients, num_rows: int, total_unique_indices: int | None) -> Tensor:
    """[num_rows, dim] with total_unique_indices entries; None = as many as there are, for which the host must wait.
    Entries too many repeat the last row, with zeros."""
    values, rows = gradients.values, gradients.rows
    if total_unique_indices is None:
        size = int(gradients.filled)
        rows = rows[:size]
    else:
        size = min(total_unique_indices, rows.numel())
        numbers = torch.arange(size, device=rows.device)
        rows = rows[torch.minimum(numbers, (gradients.filled - 1).clamp_min(0))]
        rows = torch.where(gradients.filled > 0, rows, 0)  # where there is none, nobody wrote the first
    return torch.sparse_coo_tensor(
        rows[None, :],
        values[:size],
        (num_rows, values.shape[1]),
        is_coalesced=total_unique_indices is None,
        check_invariants=False,
    )


class EmbeddingBagsWithGradient(torch.autograd.Function):
    """`fbtriton.functional` without an optimizer; weights is a parameter [rows, dim]."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, sample_weights: Tensor | None, hyperparameters: Tensor, seed_and_step: Tensor,
        indices: Tensor, offsets: Tensor, vbe: list[Tensor], batch_sizes: list[int], report: Tensor | None,
        total_unique_indices: int | None, spec: str,
    ) -> Tensor:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            output, stamp, repaired, _ = torch.ops.fbtriton.embedding_bags(
                weights, weights.detach().view(-1), [], hyperparameters, seed_and_step, None, indices, offsets,
                sample_weights, vbe, batch_sizes, report, spec,
            )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.batch_sizes, ctx.total_unique_indices = spec, batch_sizes, total_unique_indices
        ctx.weights = weights.detach()
        # Only the gradient of the per-sample weights reads the weights, which then must not have changed.
        read = weights if ctx.needs_input_grad[1] else None
        offsets = offsets if report is None else repaired
        ctx.save_for_backward(read, seed_and_step, stamp, indices, offsets, sample_weights, *vbe)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        _, seed_and_step, stamp, indices, offsets, sample_weights, *vbe = ctx.saved_tensors
        trains, needed = ctx.needs_input_grad[:2]
        sparse, sample_grad = None, None
        if grad_output is not None:
            weights, spec = ctx.weights, OperatorSpec.from_json(ctx.spec)
            on_cuda = weights.device.type == "cuda"
            with torch.cuda.device(weights.device) if on_cuda else contextlib.nullcontext():
                gradients = empty_row_gradients(weights, indices.numel() if trains else 0, spec)
                sample_grad = backward(
                    grad_output=grad_output,
                    weights=weights.view(-1),
                    states=[],
                    seed_and_step=seed_and_step,
                    stamp=stamp,
                    counts=None,
                    bags=Bags(indices, offsets, sample_weights, VbeLayout(*vbe) if vbe else None),
                    shape=BatchShape.of(offsets, ctx.batch_sizes, spec),
                    trains=trains,
                    needs_sample_weights_grad=needed,
                    spec=spec,
                    gradients=gradients,
                )
                sparse = as_sparse(gradients, weights.shape[0], ctx.total_unique_indices) if trains else None
        return sparse, sample_grad, *[None] * 9
