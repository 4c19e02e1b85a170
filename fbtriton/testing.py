"""What tests and benchmarks share: batches, an oracle run, and comparisons with derived tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fbtriton import reference
from fbtriton.batch import BatchShape, place_bags
from fbtriton.layout import Bags
from fbtriton.module import TableBatchedEmbeddingBags
from fbtriton.optim import make_stamp
from fbtriton.spec import OperatorSpec

# Relative spacing of each dtype. A sum of n terms in fp32 is off by at most n spacings of the sum of magnitudes; a
# result rounded once to a dtype is off by half its spacing.
SPACING = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Batch:
    """One request. Feature-major, as `TableBatchedEmbeddingBags.forward` takes it."""

    indices: Tensor  # [N]
    offsets: Tensor  # [F * B + 1]
    sample_weights: Tensor | None  # [N] fp32
    batch_sizes: tuple[int, ...] = ()  # [F * ranks], feature-major; empty = every feature has B samples

    def nested_batch_sizes(self, spec: OperatorSpec) -> list[list[int]] | None:
        """As `TableBatchedEmbeddingBags.forward` takes them."""
        ranks = len(self.batch_sizes) // len(spec.feature_tables)
        sizes = [list(self.batch_sizes[f * ranks : (f + 1) * ranks]) for f in range(len(spec.feature_tables))]
        return sizes if ranks else None


def make_batch(
    rows: Sequence[int],
    lengths: Sequence[Tensor],
    *,
    seed: int,
    weighted: bool = False,
    pruned: float = 0.0,
    padding: int = 0,
    hot: float = 0.0,
    index_dtype: torch.dtype = torch.int64,
    offset_dtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
) -> Batch:
    """Random ids.

    Args:
        rows: for each feature the rows of its table.
        lengths: for each feature [samples] ids in each bag; a tensor [F, B] will do.
        weighted: with per-sample weights in [-1, 1).
        pruned: share of ids that are -1.
        padding: ids after the last bag, which are garbage on purpose.
        hot: share of ids that are row 0, for long runs.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = torch.cat(list(lengths))
    offsets = torch.zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, out=offsets[1:])
    size = int(offsets[-1])
    limits = torch.tensor(list(rows)).repeat_interleave(torch.stack([part.sum() for part in lengths]))
    indices = (torch.rand(size, generator=generator, dtype=torch.float64) * limits).long()
    indices[torch.rand(size, generator=generator) < hot] = 0
    indices[torch.rand(size, generator=generator) < pruned] = -1
    indices = torch.cat([indices, torch.full((padding,), 2**30)])
    weights = torch.rand(size + padding, generator=generator) * 2 - 1 if weighted else None
    return Batch(
        indices.to(device, index_dtype),
        offsets.to(device, offset_dtype),
        None if weights is None else weights.to(device),
    )


@dataclass(frozen=True)
class Step:
    """What one forward and backward gave."""

    output: Tensor
    weights: Tensor
    states: list[Tensor]
    sample_weights_grad: Tensor | None
    largest_before: float  # magnitude among the weights before the step


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if tensor.numel() else 0.0


def run_step(module: TableBatchedEmbeddingBags, batch: Batch, grad_output: Tensor, sample_grad: bool = False) -> Step:
    """One training step of the module; the caller's tensors must come out as they went in."""
    sample_weights = batch.sample_weights
    if sample_weights is not None and sample_grad:
        sample_weights = sample_weights.clone().requires_grad_()
    given = [batch.indices.clone(), batch.offsets.clone()]
    largest_before = _largest(module.weights)
    output = module(batch.indices, batch.offsets, sample_weights, batch_sizes=batch.nested_batch_sizes(module.spec))
    output.backward(grad_output)
    assert torch.equal(batch.indices, given[0]) and torch.equal(batch.offsets, given[1]), "inputs were modified"
    return Step(
        output.detach(),
        module.weights.clone(),
        [state.clone() for state in module._states],
        sample_weights.grad if sample_weights is not None and sample_grad else None,
        largest_before,
    )


def reference_step(
    module: TableBatchedEmbeddingBags, batch: Batch, grad_output: Tensor, sample_grad: bool = False
) -> Step:
    """The same step by the oracle, on copies; the module is not changed."""
    spec: OperatorSpec = module.spec
    weights, states = module.weights.clone(), [state.clone() for state in module._states]
    seed_and_step = module.seed_and_step.clone()
    sizes = batch.batch_sizes
    vbe = place_bags(batch.offsets, sizes, spec) if sizes else None
    shape = BatchShape.of(batch.offsets, sizes, spec)
    bags = Bags(batch.indices, batch.offsets, batch.sample_weights, vbe)
    iteration = None if module.iter is None else module.iter.clone()
    report = torch.zeros_like(module.bounds_check_report)
    bags = bags._replace(offsets=reference.bounds_check(bags=bags, report=report, shape=shape, spec=spec))
    output = reference.forward(weights=weights, bags=bags, shape=shape, spec=spec)
    grad = reference.backward(
        grad_output=grad_output,
        weights=weights,
        states=states,
        seed_and_step=seed_and_step,
        stamp=make_stamp(module.hyperparameters, seed_and_step, iteration),
        bags=bags,
        shape=shape,
        trains=True,
        needs_sample_weights_grad=sample_grad,
        spec=spec,
    )
    return Step(output, weights, states, grad, _largest(module.weights))


def assert_close(actual: Tensor, expected: Tensor, *, tolerance: float, name: str, operand: float = 0.0) -> None:
    """Maximum error within `tolerance` of the largest magnitude, and RMS error within what errors spread evenly over
    that range have, 1 / sqrt(3) of it; NaN and infinities must stand in the same places. The first bad positions are
    printed. operand: a magnitude that may be larger, of what the numbers are the sum or difference of."""
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.numel() == 0:
        return
    actual, expected = actual.double().cpu(), expected.double().cpu()
    finite = torch.isfinite(expected)
    same = torch.equal(actual[~finite].nan_to_num(1e300), expected[~finite].nan_to_num(1e300))
    assert torch.equal(torch.isfinite(actual), finite) and same, f"{name}: NaN or infinity in different places"
    if not finite.any():
        return
    scale = max(operand, float(expected[finite].abs().max()))
    error = torch.where(finite, (actual - expected).abs(), 0.0).nan_to_num(0.0)
    worst, rms = float(error.max()), float(error[finite].square().mean().sqrt())
    if worst > tolerance * scale or (error.numel() >= 64 and rms > tolerance * scale / math.sqrt(3)):
        places = (error > tolerance * scale).nonzero()[:5].tolist()
        raise AssertionError(
            f"{name}: maximum error {worst:.3g}, RMS {rms:.3g}, allowed {tolerance * scale:.3g}; first at {places}:"
            f" {[float(actual[tuple(p)]) for p in places]} for {[float(expected[tuple(p)]) for p in places]}"
        )


def assert_same_step(actual: Step, expected: Step, *, terms: int, module: TableBatchedEmbeddingBags) -> None:
    """Compare a step with the oracle's.

    `terms` is the largest number of entries summed into one element. The oracle accumulates in fp64, a kernel in
    fp32: `terms` fp32 spacings of the sum of magnitudes, which is at most `terms` times the largest. A rounded dtype
    adds one of its spacings (a value near the middle between two neighbours may round to either). A state may hold
    the square of a sum, in which an error of the sum counts about that error times the root of the state.
    """
    accumulation = max(4, terms) * SPACING[torch.float32]
    spec = module.spec

    def rounding(dtype: torch.dtype) -> float:
        return 0.0 if dtype == torch.float32 else SPACING[dtype]

    output_tolerance = accumulation + rounding(spec.torch_output_dtype)
    weight_tolerance = 4 * accumulation + rounding(spec.torch_weights_dtype)
    assert_close(actual.output, expected.output, tolerance=output_tolerance, name="output")
    assert_close(
        actual.weights, expected.weights, tolerance=weight_tolerance, name="weights", operand=expected.largest_before
    )
    for number, (state, other) in enumerate(zip(actual.states, expected.states, strict=True)):
        tolerance = 4 * accumulation + rounding(state.dtype)
        assert_close(state, other, tolerance=tolerance, name=f"state {number}", operand=math.sqrt(_largest(other)))
    if expected.sample_weights_grad is not None:
        assert actual.sample_weights_grad is not None, "no gradient of the per-sample weights"
        dims = max(spec.layout.dims)
        assert_close(
            actual.sample_weights_grad,
            expected.sample_weights_grad,
            tolerance=max(4, dims) * SPACING[torch.float32],
            name="gradient of the per-sample weights",
        )
