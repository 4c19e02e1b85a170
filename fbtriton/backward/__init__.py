"""From the gradient of the output to new weights and optimizer state.

    tables counted by the forward    histogram
    all others                       linearise -> sort -> runs -> short_run | grad_accum, add_groups, apply

On sm_100 and later, with TLX, one launch takes the place of grad_accum, add_groups and apply: tlx/fused_long_run.

The sort is stable, so the entries of a run stay in the order of the batch and every sum has one fixed order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fbtriton import reference
from fbtriton.backward.histogram import histogram
from fbtriton.backward.linearise import entry_form, linearise
from fbtriton.backward.long_run import add_groups, apply, grad_accum, long_run_configs
from fbtriton.backward.runs import KINDS, RUNS, find_runs, most_pieces
from fbtriton.backward.sample_weights import sample_weights_grad
from fbtriton.backward.short_run import short_run
from fbtriton.backward.sort import sort_pairs
from fbtriton.batch import BatchShape
from fbtriton.config import LONG_AVERAGE_RUN, planned, select_fused, target_of, uses_kernels
from fbtriton.forward.routing import CountedTables, counted_tables, histogram_features
from fbtriton.layout import WIDEST, Bags, RowGradients, RunTables, TableLayout
from fbtriton.optim import OptimizerStates
from fbtriton.spec import OperatorSpec
from fbtriton.tlx.fused_long_run import fused_long_run


def with_unit_columns(grad_output: Tensor) -> Tensor:
    """Kernels take any stride between rows; elements of a row must be neighbours, so other gradients are copied."""
    return grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()


@planned
def gradient_alignments(layout: TableLayout, stride_alignment: int, vbe: bool) -> tuple[int, ...]:
    """For each bucket, what every bag's place in the gradient is a multiple of. Elements."""
    if vbe:
        return (layout.dim_alignment,) * len(layout.buckets)
    return tuple(math.gcd(bucket.column_alignment, stride_alignment) for bucket in layout.buckets)


def with_slots(tables: RunTables, gradients: RowGradients, layout: TableLayout) -> RunTables:
    """The runs with the slots of their gradients in the place of rows of the weights; says which rows they are."""
    num_slots, dim = gradients.values.shape
    gradients.rows.copy_(tables.runs.state_rows[:num_slots])
    gradients.filled.copy_(tables.ranges[len(layout.buckets) * KINDS.value + RUNS.value])
    step = dim // layout.row_unit
    offsets = torch.arange(0, tables.runs.weight_offsets.numel() * step, step, device=gradients.rows.device)
    return tables._replace(runs=tables.runs._replace(weight_offsets=offsets))


def backward(
    *, grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    counts: Tensor | None, bags: Bags, shape: BatchShape, trains: bool, needs_sample_weights_grad: bool,
    spec: OperatorSpec, gradients: RowGradients | None = None,
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
    stride_alignment = math.gcd(WIDEST, grad_output.stride(0))
    grad_alignments = gradient_alignments(spec.layout, stride_alignment, bags.vbe is not None)
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
    optimizer_states = OptimizerStates(*states, *[None] * (2 - len(states)))
    counted = _counted(counts, bags, shape, spec)
    left_out = tuple(f for part in counted for f in part.features)
    sorts = not left_out or spec.trained_features - set(left_out)
    if counts is not None and counted:
        histogram(
            weights=weights,
            states=optimizer_states,
            stamp=stamp,
            step=None if sorts else seed_and_step[1:],
            grad_output=grad_output,
            grad_alignments=grad_alignments,
            counts=counts,
            bags=bags,
            tables=counted,
            spec=spec,
        )
    if sorts:
        _update_by_runs(
            grad_output=grad_output,
            grad_alignments=grad_alignments,
            weights=weights,
            states=optimizer_states,
            seed_and_step=seed_and_step,
            stamp=stamp,
            bags=bags,
            shape=shape,
            left_out=left_out,
            gradients=gradients,
            spec=spec,
        )
    return sample_grad


def _counted(counts: Tensor | None, bags: Bags, shape: BatchShape, spec: OperatorSpec) -> tuple[CountedTables, ...]:
    """The tables for which the forward has left counts."""
    if counts is None or counts.numel() == 0:
        return ()
    features, _ = histogram_features(
        spec,
        bags.indices.numel() / shape.num_bags,
        weighted=bags.sample_weights is not None,
        vbe=bags.vbe is not None,
    )
    assert counts.shape[0] == len(features), "forward and backward take the same route"
    return counted_tables(spec, features)


def _update_by_runs(
    *, grad_output: Tensor, grad_alignments: tuple[int, ...], weights: Tensor, states: OptimizerStates,
    seed_and_step: Tensor, stamp: Tensor, bags: Bags, shape: BatchShape, left_out: tuple[int, ...],
    gradients: RowGradients | None, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Sort the entries, but for those of the features in left_out, and update each row once."""
    layout = spec.layout
    long_runs = long_run_configs(spec)
    form = entry_form(bags, grad_alignments, spec)
    keys, entries = linearise(bags=bags, shape=shape, grad_output=grad_output, form=form, left_out=left_out, spec=spec)
    keys, payload = sort_pairs(keys, entries.payload, max(1, layout.no_key.bit_length()))
    entries = entries._replace(payload=payload)
    tables = find_runs(keys=keys, seed_and_step=seed_and_step, long_run=long_runs[0], spec=spec)
    del keys  # room for the partial gradients
    if gradients is not None:
        weights, tables = gradients.values, with_slots(tables, gradients, layout)

    short_run(
        weights=weights,
        states=states,
        stamp=stamp,
        grad_output=grad_output,
        grad_alignments=grad_alignments,
        entries=entries,
        form=form,
        tables=tables,
        threshold=long_runs[0].threshold,
        long_average=bags.indices.numel() >= LONG_AVERAGE_RUN * layout.no_key,
        spec=spec,
    )
    fused = select_fused(target_of(weights.device), layout.block_dims, spec.deterministic)
    if fused is not None:
        fused_long_run(
            weights=weights,
            states=states,
            stamp=stamp,
            grad_output=grad_output,
            grad_alignments=grad_alignments,
            entries=entries,
            form=form,
            tables=tables,
            config=fused,
            spec=spec,
        )
        return
    num_pieces = most_pieces(payload.numel(), layout.no_key, long_runs[0])
    partials = grad_output.new_empty(num_pieces, max(layout.dims), dtype=torch.float32)
    grad_accum(
        partials=partials,
        grad_output=grad_output,
        grad_alignments=grad_alignments,
        entries=entries,
        form=form,
        tables=tables,
        spec=spec,
    )
    add_groups(partials=partials, tables=tables, spec=spec)
    apply(weights=weights, states=states, stamp=stamp, partials=partials, tables=tables, spec=spec)
