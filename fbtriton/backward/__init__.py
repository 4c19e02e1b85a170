"""linearise -> sort -> runs -> pieces -> short_run | grad_accum, add_groups, apply -> weights and optimizer state.

The sort is stable, so the entries of a run stay in the order of the batch and every sum has one fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fbtriton import reference
from fbtriton.backward.linearise import entry_form, linearise
from fbtriton.backward.long_run import add_groups, apply, grad_accum
from fbtriton.backward.pieces import expand
from fbtriton.backward.runs import KINDS, RUNS, find_runs
from fbtriton.backward.sample_weights import sample_weights_grad
from fbtriton.backward.short_run import short_run
from fbtriton.backward.sort import sort_pairs
from fbtriton.batch import BatchShape
from fbtriton.config import select_long_run, uses_kernels
from fbtriton.layout import Bags, OperatorSpec, RowGradients, RunTables, TableLayout
from fbtriton.optim import OptimizerStates


def with_unit_columns(grad_output: Tensor) -> Tensor:
    """Kernels take any stride between rows; elements of a row must be neighbours, so other gradients are copied."""
    return grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()


def gradient_alignments(grad_output: Tensor, bags: Bags, layout: TableLayout) -> list[int]:
    """For each bucket, what every bag's place in the gradient is a multiple of. Elements."""
    if bags.vbe is not None:
        return [layout.dim_alignment] * len(layout.buckets)
    return [math.gcd(bucket.column_alignment, grad_output.stride(0)) for bucket in layout.buckets]


def with_slots(tables: RunTables, gradients: RowGradients) -> RunTables:
    """The runs with the slots of their gradients in the place of rows of the weights; says which rows they are."""
    num_slots, dim = gradients.values.shape
    gradients.rows.copy_(tables.runs.state_rows[:num_slots])
    gradients.filled.copy_(tables.ranges[-KINDS.value + RUNS.value])
    offsets = torch.arange(0, tables.runs.weight_offsets.numel() * dim, dim, device=gradients.rows.device)
    return tables._replace(runs=tables.runs._replace(weight_offsets=offsets))


def backward(
    *, grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    bags: Bags, shape: BatchShape, trains: bool, needs_sample_weights_grad: bool, spec: OperatorSpec,
    gradients: RowGradients | None = None,
) -> Tensor | None:  # fmt: skip
    """Update weights and states in place if they are trained; returns the gradient of the per-sample weights if it is
    needed. With gradients those are filled, and nothing is updated."""
    if not uses_kernels(weights.device):
        return reference.backward(
            grad_output=grad_output,
            weights=weights,
            states=states,
            seed_and_step=seed_and_step,
            stamp=stamp,
            bags=bags,
            shape=shape,
            trains=trains,
            needs_sample_weights_grad=needs_sample_weights_grad,
            spec=spec,
            gradients=gradients,
        )
    if shape.num_bags == 0 or bags.indices.numel() == 0:
        return torch.zeros_like(bags.indices, dtype=torch.float32) if needs_sample_weights_grad else None

    grad_output = with_unit_columns(reference.clip(grad_output, spec))
    buckets = spec.layout.buckets
    grad_alignments = gradient_alignments(grad_output, bags, spec.layout)
    sample_grad = None
    if needs_sample_weights_grad:
        sample_grad = sample_weights_grad(
            weights=weights,
            bags=bags,
            shape=shape,
            grad_output=grad_output,
            grad_alignments=grad_alignments,
            spec=spec,
        )

    if not trains:
        return sample_grad
    long_runs = [select_long_run(bucket.dim) for bucket in buckets]
    trees = {(config.threshold, config.piece_length, config.fan_in) for config in long_runs}
    assert len(trees) == 1, "runs are cut into pieces alike in all buckets"
    form = entry_form(bags, grad_alignments, spec)
    keys, entries = linearise(bags=bags, shape=shape, grad_output=grad_output, form=form, spec=spec)
    keys, payload = sort_pairs(keys, entries.payload, max(1, spec.layout.no_key.bit_length()))
    entries = entries._replace(payload=payload)
    tables = find_runs(keys=keys, seed_and_step=seed_and_step, long_run=long_runs[0], spec=spec)
    expand(tables=tables, long_run=long_runs[0])
    if gradients is not None:
        weights, tables = gradients.values, with_slots(tables, gradients)

    partials = grad_output.new_empty(tables.pieces.starts.numel(), max(spec.layout.dims), dtype=torch.float32)
    optimizer_states = OptimizerStates(*states, *[None] * (2 - len(states)))
    short_run(
        weights=weights,
        states=optimizer_states,
        stamp=stamp,
        grad_output=grad_output,
        grad_alignments=grad_alignments,
        entries=entries,
        form=form,
        tables=tables,
        threshold=long_runs[0].threshold,
        entries_per_row=bags.indices.numel() / max(1, spec.layout.no_key),
        spec=spec,
    )
    grad_accum(
        partials=partials,
        grad_output=grad_output,
        grad_alignments=grad_alignments,
        entries=entries,
        form=form,
        tables=tables,
        configs=long_runs,
        spec=spec,
    )
    add_groups(partials=partials, tables=tables, block_dim=buckets[-1].block_dim, config=long_runs[-1])
    apply(
        weights=weights,
        states=optimizer_states,
        stamp=stamp,
        partials=partials,
        tables=tables,
        configs=long_runs,
        spec=spec,
    )
    return sample_grad
