"""Is a provider right? Its output and its update of the touched rows, against fp64 arithmetic on those rows only.

    before = look_at(provider, request)         # copies the touched rows, never a table
    output = provider.forward(request); provider.backward(output, grad)
    check(provider, before, output, grad)       # raises WrongResult

Allowed errors are derived. A sum of n terms in fp32, in any order, is off by at most n spacings of the sum of
magnitudes; for orders that kernels use, a few spacings of n times the largest term bounds it. A row of fp16 may be
either neighbour of the exact value, whichever way it is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bench.providers import EPS, LEARNING_RATE, Provider
from bench.workloads import Request, Workload

SPACING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
LEAST_NORMAL = {torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
SUM_SPACINGS = 4  # fp32 spacings allowed for each term of a sum
CHUNK_ELEMENTS = 2**26  # of an intermediate tensor, 512 MB of fp64
MAX_NEIGHBOURS = 65_536


class WrongResultError(Exception):
    """A provider's result differs from the oracle's; the message says where and by how much."""


class Entries(NamedTuple):
    """The ids of one feature."""

    table: int
    rows: Tensor  # [n] int64
    samples: Tensor  # [n] int64
    scales: Tensor | None  # [n] fp64


class Touched(NamedTuple):
    """The rows of one table that a request looks up, as they were before the step."""

    rows: Tensor  # [u] int64, ascending
    weights: Tensor  # [u, dim]
    state: Tensor  # [u]
    neighbours: Tensor  # [k] some rows that are not looked up, each next to one that is
    neighbour_weights: Tensor  # [k, dim]


class Before(NamedTuple):
    entries: list[Entries]
    tables: list[Touched]


def entries_of(workload: Workload, request: Request) -> list[Entries]:
    """The ids of each feature with their samples. Waits for the device."""
    offsets = request.offsets.long()
    result, bag = [], 0
    for feature, table in enumerate(workload.feature_tables):
        count = workload.samples[feature]
        bounds = offsets[bag : bag + count + 1]
        lengths = bounds[1:] - bounds[:-1]
        samples = torch.repeat_interleave(torch.arange(count, device=offsets.device), lengths)
        entries = slice(int(bounds[0]), int(bounds[-1]))
        scales = None if request.sample_weights is None else request.sample_weights[entries].double()
        if workload.pooling == "mean":
            inverse = 1.0 / lengths.double()[samples]
            scales = inverse if scales is None else scales * inverse
        result.append(Entries(table, request.indices[entries].long(), samples, scales))
        bag += count
    return result


def look_at(provider: Provider, request: Request) -> Before:
    """Copy what the step will change, and some rows that it must not change."""
    entries = entries_of(provider.workload, request)
    tables = []
    for number, (weight, state) in enumerate(zip(provider.tables(), provider.states(), strict=True)):
        parts = [part.rows for part in entries if part.table == number]
        rows = torch.unique(torch.cat(parts))
        neighbours = _neighbours(rows, weight.shape[0])
        tables.append(Touched(rows, weight[rows], state[rows].clone(), neighbours, weight[neighbours]))
    return Before(entries, tables)


def _neighbours(rows: Tensor, table_rows: int) -> Tensor:
    """Rows beside those of an ascending list that are not in it, at most MAX_NEIGHBOURS on each side."""
    end = rows.new_tensor([table_rows])
    after = rows[rows + 1 < torch.cat([rows[1:], end])] + 1
    before = rows[rows - 1 > torch.cat([rows.new_tensor([-1]), rows[:-1]])] - 1
    return torch.cat([after[:MAX_NEIGHBOURS], before[-MAX_NEIGHBOURS:]])


def _chunks(entries: Entries, dim: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // dim)
    for start in range(0, entries.rows.numel(), step):
        yield slice(start, start + step)


def _largest_scale(entries: Entries) -> float:
    if entries.scales is None or not entries.scales.numel():
        return 1.0
    return float(entries.scales.abs().max())


def _compare(actual: Tensor, expected: Tensor, allowed: Tensor, what: str) -> None:
    """NaN never passes."""
    error = (actual.double() - expected).abs()
    bad = ~(error <= allowed)
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise WrongResultError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements differ; at {list(place)} {float(actual[place]):.6g}"
            f" where {float(expected[place]):.6g} is expected, allowed {float(allowed[place]):.2g}"
        )


def check_output(provider: Provider, before: Before, output: Tensor) -> None:
    """The forward, all of it."""
    workload = provider.workload
    if tuple(output.shape) != workload.output_shape:
        raise WrongResultError(f"output has shape {list(output.shape)}, expected {list(workload.output_shape)}")
    for feature, (entries, part) in enumerate(zip(before.entries, workload.split(output), strict=True)):
        touched = before.tables[entries.table]
        expected = part.new_zeros(part.shape, dtype=torch.float64)
        for chunk in _chunks(entries, part.shape[1]):
            found = torch.searchsorted(touched.rows, entries.rows[chunk])
            rows = touched.weights[found].double()
            if entries.scales is not None:
                rows *= entries.scales[chunk, None]
            expected.index_add_(0, entries.samples[chunk], rows)
        lengths = torch.bincount(entries.samples, minlength=part.shape[0])
        largest = float(touched.weights.abs().max()) if touched.rows.numel() else 0.0
        allowed = SUM_SPACINGS * SPACING[torch.float32] * largest * _largest_scale(entries) * lengths.double()[:, None]
        spacing = 0.0 if part.dtype == torch.float32 else SPACING[part.dtype]
        _compare(part, expected, allowed + spacing * expected.abs(), f"forward, feature {feature}")


def _sum_gradients(provider: Provider, before: Before, grads: list[Tensor], table: int) -> tuple[Tensor, Tensor]:
    """The exact gradient [u, dim] of a table's touched rows, and the number of entries [u] of each."""
    touched = before.tables[table]
    dim = touched.weights.shape[1]
    total = torch.zeros(touched.weights.shape, dtype=torch.float64, device=touched.weights.device)
    lengths = torch.zeros(touched.rows.numel(), dtype=torch.int64, device=total.device)
    for entries, grad in zip(before.entries, grads, strict=True):
        if entries.table != table:
            continue
        for chunk in _chunks(entries, dim):
            found = torch.searchsorted(touched.rows, entries.rows[chunk])
            parts = grad[entries.samples[chunk]].double()
            if entries.scales is not None:
                parts *= entries.scales[chunk, None]
            total.index_add_(0, found, parts)
            lengths += torch.bincount(found, minlength=lengths.numel())
    return total, lengths


def _check_table(provider: Provider, before: Before, grads: list[Tensor], table: int) -> None:
    touched = before.tables[table]
    weight, state = provider.tables()[table], provider.states()[table]
    pairs = zip(before.entries, grads, strict=True)
    largest = max(float(grad.abs().max()) * _largest_scale(part) for part, grad in pairs if part.table == table)
    total, lengths = _sum_gradients(provider, before, grads, table)
    spacing = SUM_SPACINGS * SPACING[torch.float32] + provider.grad_spacing
    grad_error = (spacing * largest * lengths.double())[:, None]
    new_state = touched.state.double() + total.square().mean(dim=1)
    root = new_state.sqrt()[:, None] + EPS
    step = LEARNING_RATE * total / root
    expected = touched.weights.double() - step
    # The step moves by grad_error / root through its numerator and at most as much, times |total| / root, through it.
    allowed = LEARNING_RATE * grad_error / root * (1 + total.abs() / root)
    allowed += 4 * SPACING[torch.float32] * (expected.abs() + step.abs())
    actual = weight[touched.rows]
    if weight.dtype in LEAST_NORMAL:
        magnitude = torch.maximum(actual.double().abs(), expected.abs()).clamp_min(LEAST_NORMAL[weight.dtype])
        _, exponent = torch.frexp(magnitude)
        allowed += torch.ldexp(torch.full_like(magnitude, SPACING[weight.dtype]), exponent - 1)
    _compare(actual, expected, allowed, f"rows of table {table} after the update")
    state_error = 2 * (grad_error * total.abs()).mean(dim=1) + grad_error[:, 0] ** 2
    state_error += SUM_SPACINGS * SPACING[torch.float32] * total.shape[1] * new_state
    _compare(state[touched.rows], new_state, state_error, f"row-wise state of table {table}")
    if not torch.equal(weight[touched.neighbours], touched.neighbour_weights):
        raise WrongResultError(f"table {table}: rows changed that were not looked up")


def check(provider: Provider, before: Before, output: Tensor, grad: Tensor) -> None:
    """The forward's output, and every touched row and its state after the backward.

    Raises:
        WrongResultError: something differs by more than is allowed.
    """
    check_output(provider, before, output.detach())
    grads = provider.workload.split(grad)
    for table, touched in enumerate(before.tables):
        if touched.rows.numel():
            _check_table(provider, before, grads, table)
