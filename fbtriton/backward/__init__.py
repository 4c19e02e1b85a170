"""linearise -> sort -> runs -> pieces -> short_run | grad_accum, add_groups, apply -> weights and optimizer state.

On sm_100 and later, with TLX, one launch takes the place of grad_accum, add_groups and apply: tlx/fused_long_run.

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
from fbtriton.backward.runs import find_runs
from fbtriton.backward.sample_weights import sample_weights_grad
from fbtriton.backward.short_run import short_run
from fbtriton.backward.sort import sort_pairs
from fbtriton.batch import BatchShape
from fbtriton.config import select_fused, select_long_run, target_of, uses_kernels
from fbtriton.layout import Bags, OperatorSpec, TableLayout
from fbtriton.optim import OptimizerStates
from fbtriton.tlx.fused_long_run import fused_long_run, with_arrivals


def with_unit_columns(grad_output: Tensor) -> Tensor:
    """Kernels take any stride between rows; elements of a row must be neighbours, so other gradients are copied."""
    return grad_output if grad_output.stride(-1) == 1 else grad_output.contiguous()


def gradient_alignments(grad_output: Tensor, bags: Bags, layout: TableLayout) -> list[int]:
    """For each bucket, what every bag's place in the gradient is a multiple of. Elements."""
    if bags.vbe is not None:
        return [layout.dim_alignment] * len(layout.buckets)
    return [math.gcd(bucket.column_alignment, grad_output.stride(0)) for bucket in layout.buckets]


def backward(
    *, grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    bags: Bags, shape: BatchShape, trains: bool, needs_sample_weights_grad: bool, spec: OperatorSpec,
) -> Tensor | None:  # fmt: skip
    """Update weights and states in place if they are trained; returns the gradient of the per-sample weights if it is
    needed."""
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
        )
    if shape.num_bags == 0 or bags.indices.numel() == 0:
        return torch.zeros_like(bags.indices, dtype=torch.float32) if needs_sample_weights_grad else None

    grad_output = with_unit_columns(grad_output)
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
    long_runs = [select_long_run(bucket.block_dim) for bucket in buckets]
    trees = {(config.threshold, config.piece_length, config.fan_in) for config in long_runs}
    assert len(trees) == 1, "runs are cut into pieces alike in all buckets"
    form = entry_form(bags, grad_alignments, spec)
    keys, entries = linearise(bags=bags, shape=shape, grad_output=grad_output, form=form, spec=spec)
    keys, payload = sort_pairs(keys, entries.payload, max(1, spec.layout.no_key.bit_length()))
    entries = entries._replace(payload=payload)
    tables = find_runs(keys=keys, seed_and_step=seed_and_step, long_run=long_runs[0], spec=spec)
    fused = select_fused(target_of(weights.device), tuple(b.block_dim for b in buckets), spec.deterministic)
    if fused is not None:
        tables = with_arrivals(tables)
    expand(tables=tables, long_run=long_runs[0])

    optimizer_states = OptimizerStates(*states, *[None] * (2 - len(states)))
    for number, (bucket, long_run) in enumerate(zip(buckets, long_runs, strict=True)):
        short_run(
            weights=weights,
            states=optimizer_states,
            stamp=stamp,
            grad_output=grad_output,
            grad_alignment=grad_alignments[number],
            entries=entries,
            form=form,
            tables=tables,
            bucket=bucket,
            bucket_number=number,
            threshold=long_run.threshold,
            spec=spec,
        )
    if fused is not None:
        fused_long_run(
            weights=weights,
            states=optimizer_states,
            stamp=stamp,
            grad_output=grad_output,
            grad_alignments=grad_alignments,
            entries=entries,
            form=form,
            tables=tables,
            long_runs=long_runs,
            config=fused,
            spec=spec,
        )
        return sample_grad
    partials = grad_output.new_empty(tables.pieces.starts.numel(), max(spec.layout.dims), dtype=torch.float32)
    for number, (bucket, long_run) in enumerate(zip(buckets, long_runs, strict=True)):
        grad_accum(
            partials=partials,
            grad_output=grad_output,
            grad_alignment=grad_alignments[number],
            entries=entries,
            form=form,
            tables=tables,
            bucket=bucket,
            bucket_number=number,
            config=long_run,
        )
    add_groups(partials=partials, tables=tables, block_dim=buckets[-1].block_dim, config=long_runs[-1])
    for number, (bucket, long_run) in enumerate(zip(buckets, long_runs, strict=True)):
        apply(
            weights=weights,
            states=optimizer_states,
            stamp=stamp,
            partials=partials,
            tables=tables,
            bucket=bucket,
            bucket_number=number,
            config=long_run,
            spec=spec,
        )
    return sample_grad
