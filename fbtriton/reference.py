"""The whole operator in plain PyTorch with fp64 accumulation: what CPU tensors run, and the oracle of every kernel.

Each function does one stage the obvious way. It works on any device, and waits for it freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fbtriton.batch import BatchShape
from fbtriton.bounds_check import first_bad_words
from fbtriton.layout import Bags, RowGradients
from fbtriton.optim import OPTIMIZERS, STATES, read_stamp
from fbtriton.rounding import round_stochastically_reference, rounding_noise_reference
from fbtriton.spec import OperatorSpec


class FeatureEntries(NamedTuple):
    """The entries of one feature that take part: not pruned, not padding."""

    feature: int
    table: int
    place: Any  # index of the feature's part [samples, dim] of the output
    positions: Tensor  # [n] where each entry lies in the indices
    samples: Tensor  # [n] of this feature
    num_samples: int
    rows: Tensor  # [n] int64, repaired
    scales: Tensor  # [n] fp64, per-sample weight, divided by the bag's length if pooling is "mean"


def bounds_check(*, bags: Bags, report: Tensor, shape: BatchShape, spec: OperatorSpec) -> Tensor:
    """The repaired offsets; counts into report in mode "warning", raises ValueError in mode "fatal"."""
    indices, offsets = bags.indices, bags.offsets
    num_entries = indices.numel()
    given = offsets.to(torch.int64)
    repaired = given.clamp(0, num_entries)
    repaired[0] = 0
    repaired = repaired.cummax(0).values
    bad_offsets = (repaired != given).nonzero().flatten()
    mode = spec.bounds_check
    if mode == "fatal" and bad_offsets.numel():
        bag = int(bad_offsets[0])
        raise ValueError(
            f"offsets must start at 0, not decrease and stay within the {num_entries} indices,"
            f" got offsets[{bag}] = {int(given[bag])}"
        )
    if mode in ("warning", "fatal"):
        bad = [_bad_ids(feature, indices, repaired, shape, spec) for feature in range(len(spec.feature_tables))]
        positions = torch.cat(bad)
        if positions.numel():
            position = int(positions.min())
            bag = int(torch.searchsorted(repaired, position, right=True)) - 1
            feature = int(np.searchsorted(shape.first_bags, bag, side="right")) - 1
            sample, bad_id = bag - shape.first_bags[feature], int(indices[position])
            if mode == "fatal":
                table_rows = spec.tables[spec.feature_tables[feature]][0]
                raise ValueError(
                    f"indices of feature {feature} must be in [0, {table_rows}) or -1, got {bad_id} in sample {sample}"
                )
            if not report[2]:
                words = first_bad_words(position, feature, sample, bad_id)
                report[2:6] = torch.tensor(words, device=report.device)
        report[0] += positions.numel()
        report[1] += bad_offsets.numel()
    return repaired.to(offsets.dtype)


def _bad_ids(feature: int, indices: Tensor, offsets: Tensor, shape: BatchShape, spec: OperatorSpec) -> Tensor:
    """Positions of one feature's ids that are out of range."""
    begin, end = int(offsets[shape.first_bags[feature]]), int(offsets[shape.first_bags[feature + 1]])
    ids = indices[begin:end]
    rows = spec.tables[spec.feature_tables[feature]][0]
    return begin + ((ids != -1) & ((ids < 0) | (ids >= rows))).nonzero().flatten()


def features_of(*, bags: Bags, shape: BatchShape, spec: OperatorSpec) -> Iterator[FeatureEntries]:
    """Every feature with its entries, ids repaired: out of range means row 0, -1 takes no part."""
    layout = spec.layout
    num_entries = bags.indices.numel()
    offsets = bags.offsets.to(torch.int64).clamp(0, num_entries)
    first_bags = _first_bags(bags, shape)
    for feature, table in enumerate(spec.feature_tables):
        first, last = first_bags[feature : feature + 2]
        bounds = offsets[first : last + 1]
        lengths = (bounds[1:] - bounds[:-1]).clamp_min(0)
        samples = torch.repeat_interleave(torch.arange(last - first, device=offsets.device), lengths)
        before = torch.cumsum(lengths, 0) - lengths
        positions = torch.arange(samples.numel(), device=offsets.device) + (bounds[:-1] - before)[samples]
        rows = bags.indices[positions].to(torch.int64)
        live = (rows != -1) & (layout.rows[table] > 0)
        positions, samples, rows = positions[live], samples[live], rows[live]
        scales = torch.ones(rows.shape, dtype=torch.float64, device=rows.device)
        if bags.sample_weights is not None:
            scales = bags.sample_weights[positions].double()
        if spec.mean:
            scales = scales / lengths[samples]
        yield FeatureEntries(
            feature=feature,
            table=table,
            place=_place(feature, first, last, bags, spec),
            num_samples=last - first,
            positions=positions,
            samples=samples,
            rows=torch.where((rows >= 0) & (rows < layout.rows[table]), rows, 0),
            scales=scales,
        )


def _first_bags(bags: Bags, shape: BatchShape) -> list[int]:
    """[F + 1] the first bag of each feature; without pooling only the device knows."""
    if shape.entries is None:
        return shape.first_bags
    assert bags.vbe is not None, "entries are placed like bags of a batch size for each feature"
    return bags.vbe.first_bags.cummax(0).values.tolist()


def _place(feature: int, first_bag: int, last_bag: int, bags: Bags, spec: OperatorSpec) -> Any:
    """Index of a feature's part [samples, dim] of the output or its gradient."""
    layout = spec.layout
    if bags.vbe is None:
        return slice(None), slice(layout.columns[feature], layout.columns[feature + 1])
    first = bags.vbe.output_offsets[first_bag:last_bag]
    return first[:, None] + torch.arange(layout.feature_dims[feature], device=first.device)


def table_views(weights: Tensor, spec: OperatorSpec) -> list[Tensor]:
    """Views [rows, dim] of the flat weights, one for each table."""
    starts = spec.layout.weight_offsets
    return [
        weights[start : start + rows * dim].view(rows, dim)
        for start, (rows, dim) in zip(starts, spec.tables, strict=False)
    ]


def state_views(states: list[Tensor], spec: OperatorSpec) -> list[list[Tensor]]:
    """For each table a view of each state: [rows] of a row-wise one, [rows, dim] of one with an element per weight."""
    bases = spec.layout.state_bases
    views = [
        [state[begin:end] for begin, end in zip(bases, bases[1:], strict=False)] if kind.rowwise
        else table_views(state, spec)
        for state, kind in zip(states, STATES[spec.optimizer], strict=True)
    ]  # fmt: skip
    return [[of_state[table] for of_state in views] for table in range(len(spec.tables))]


def forward(*, weights: Tensor, bags: Bags, shape: BatchShape, spec: OperatorSpec) -> Tensor:
    """output of the bag (f, b) = sum over the bag (f, b) of scale * row, rounded once to the output's dtype."""
    tables = table_views(weights, spec)
    output = weights.new_zeros(shape.output_shape, dtype=torch.float64)
    for entries in features_of(bags=bags, shape=shape, spec=spec):
        rows = tables[entries.table][entries.rows].double() * entries.scales[:, None]
        pooled = output.new_zeros(entries.num_samples, rows.shape[1])
        output[entries.place] = pooled.index_add_(0, entries.samples, rows)
    return output.to(spec.torch_output_dtype)


def sample_weights_grad(
    *, grad_output: Tensor, weights: Tensor, bags: Bags, shape: BatchShape, spec: OperatorSpec
) -> Tensor:
    """[N] fp32: for each entry the dot product of its row and its bag's gradient; 0 where nothing takes part."""
    tables = table_views(weights, spec)
    unweighted = bags._replace(sample_weights=None)
    result = torch.zeros(bags.indices.numel(), dtype=torch.float64, device=weights.device)
    for entries in features_of(bags=unweighted, shape=shape, spec=spec):
        grads = grad_output[entries.place].double()[entries.samples] * entries.scales[:, None]
        result[entries.positions] = (grads * tables[entries.table][entries.rows].double()).sum(dim=1)
    return result.float()


def clip(grad_output: Tensor, spec: OperatorSpec) -> Tensor:
    """`max_gradient` of `fbtriton.optim.Optimizer`."""
    return grad_output.clamp(-spec.max_gradient, spec.max_gradient) if spec.max_gradient else grad_output


def backward(
    *, grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    bags: Bags, shape: BatchShape, trains: bool, needs_sample_weights_grad: bool, spec: OperatorSpec,
    gradients: RowGradients | None = None,
) -> Tensor | None:  # fmt: skip
    """One optimizer step for every row that takes part, with its exact summed gradient, in place. With gradients those
    are filled, and nothing is updated."""
    grad_output = clip(grad_output, spec)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((weights, seed_and_step, *states)):
        sample_grad = None
        if needs_sample_weights_grad:
            sample_grad = sample_weights_grad(
                grad_output=grad_output, weights=weights, bags=bags, shape=shape, spec=spec
            )
        if trains and shape.num_bags and bags.indices.numel():
            update_tables(
                grad_output=grad_output, weights=weights, states=states, stamp=stamp,
                bags=bags, shape=shape, spec=spec, gradients=gradients,
            )  # fmt: skip
            seed_and_step[1] += 1
    return sample_grad


def update_tables(
    *, grad_output: Tensor, weights: Tensor, states: list[Tensor], stamp: Tensor,
    bags: Bags, shape: BatchShape, spec: OperatorSpec, gradients: RowGradients | None = None,
) -> None:  # fmt: skip
    """Sum the gradients of each table's rows over all its features, then update those rows."""
    tables, table_states = table_views(weights, spec), state_views(states, spec)
    rows: list[list[Tensor]] = [[] for _ in tables]
    grads: list[list[Tensor]] = [[] for _ in tables]
    for entries in features_of(bags=bags, shape=shape, spec=spec):
        rows[entries.table].append(entries.rows)
        grads[entries.table].append(grad_output[entries.place].double()[entries.samples] * entries.scales[:, None])
    for table, weight in enumerate(tables):
        if table in spec.frozen_tables:
            continue
        touched, inverse = torch.unique(torch.cat(rows[table]), return_inverse=True)
        if touched.numel():
            base = spec.layout.state_bases[table]
            grad = torch.zeros(touched.numel(), weight.shape[1], dtype=torch.float64, device=weight.device)
            grad.index_add_(0, inverse, torch.cat(grads[table]))
            if gradients is not None:
                append_gradients(gradients, touched + base, grad)
                continue
            update_rows(
                weight=weight, states=table_states[table], touched=touched, grad=grad, stamp=stamp,
                state_base=base, spec=spec,
            )  # fmt: skip


def append_gradients(gradients: RowGradients, rows: Tensor, grad: Tensor) -> None:
    """Round the gradients [n, dim] fp64 of some rows [n] and put them behind what is there."""
    begin = int(gradients.filled)
    gradients.rows[begin : begin + rows.numel()] = rows
    gradients.values[begin : begin + rows.numel()] = grad.to(gradients.values.dtype)
    gradients.filled.add_(rows.numel())


def update_rows(
    *, weight: Tensor, states: list[Tensor], touched: Tensor, grad: Tensor, stamp: Tensor, state_base: int,
    spec: OperatorSpec,
) -> None:  # fmt: skip
    """The optimizer's formula in fp64 for the touched rows [n] of one table, rounded once to the table's dtype."""
    step, seed, hyperparameters = read_stamp(stamp)
    old_states = [state[touched].double() for state in states]
    new = OPTIMIZERS[spec.optimizer].reference(weight[touched].double(), grad, old_states, hyperparameters)
    for state, value in zip(states, old_states, strict=True):
        state[touched] = value.to(state.dtype)
    if spec.stochastic_rounding and weight.dtype != torch.float32:
        noise = rounding_noise_reference(seed, step, touched + state_base, weight.shape[1])
        weight[touched] = round_stochastically_reference(new.float(), noise, weight.dtype)
    else:
        weight[touched] = new.to(weight.dtype)
