"""The operator as ops and one function: validate -> bounds check -> forward, with the backward tied in.

The ops are declared with `torch.library.Library.define`. The forward's schema says that it writes the bounds report
and the iteration, the backward's that it writes weights, states and seed_and_step; those writes bump no version
counter, so two forwards may precede a backward. What the update needs from the time of the forward (learning rate,
step, seed) travels in the stamp that the forward returns. The backward is tied in by an `autograd.Function` under the
Autograd key, because `register_autograd` takes no op that writes one of its arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fbtriton import bounds_check as bounds
from fbtriton import reference
from fbtriton.arguments import check_bags, check_ids_and_offsets, check_sample_weights, check_unique
from fbtriton.backward import backward
from fbtriton.batch import BatchShape, place_bags
from fbtriton.config import uses_kernels
from fbtriton.forward import forward
from fbtriton.forward.routing import kept_counts
from fbtriton.layout import Bags, VbeLayout
from fbtriton.optim import stamp_size
from fbtriton.row_gradients import EmbeddingBagsWithGradient
from fbtriton.sequence import place_entries
from fbtriton.spec import OperatorSpec

_library = torch.library.Library("fbtriton", "DEF")
_library.define(
    "place_bags(Tensor offsets, SymInt[] batch_sizes, str spec) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "place_entries(Tensor indices, Tensor offsets, str spec) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "check_bounds(Tensor indices, Tensor offsets, Tensor[] vbe, SymInt[] batch_sizes, Tensor(a!) report, str spec)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "embedding_bags(Tensor anchor, Tensor weights, Tensor[] states, Tensor hyperparameters, Tensor seed_and_step,"
    " Tensor(b!)? iteration, Tensor indices, Tensor offsets, Tensor? sample_weights, Tensor[] vbe,"
    " SymInt[] batch_sizes, Tensor(a!)? report, str spec) -> (Tensor output, Tensor stamp, Tensor repaired_offsets,"
    " Tensor counts)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "embedding_bags_backward(Tensor grad_output, Tensor(a!) weights, Tensor(b!)[] states, Tensor(c!) seed_and_step,"
    " Tensor stamp, Tensor counts, Tensor indices, Tensor offsets, Tensor? sample_weights, Tensor[] vbe,"
    " SymInt[] batch_sizes,"
    " bool trains, bool needs_sample_weights_grad, str spec) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def _bags(indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor]) -> Bags:
    return Bags(indices, offsets, sample_weights, VbeLayout(*vbe) if vbe else None)


def _place_bags(offsets: Tensor, batch_sizes: list[int], spec: str) -> list[Tensor]:
    with _device_of(offsets):
        return list(place_bags(offsets, batch_sizes, OperatorSpec.from_json(spec)))


def _place_entries(indices: Tensor, offsets: Tensor, spec: str) -> list[Tensor]:
    with _device_of(offsets):
        places = place_entries(indices, offsets, OperatorSpec.from_json(spec))
    return [places.offsets, *places.vbe]


def _check_bounds(
    indices: Tensor, offsets: Tensor, vbe: list[Tensor], batch_sizes: list[int], report: Tensor, spec: str
) -> Tensor:
    parsed = OperatorSpec.from_json(spec)
    check = bounds.bounds_check if uses_kernels(indices.device) else reference.bounds_check
    shape = BatchShape.of_samples(offsets, batch_sizes, parsed)
    with _device_of(indices):
        return check(bags=_bags(indices, offsets, None, vbe), report=report, shape=shape, spec=parsed)


def _embedding_bags(
    anchor: Tensor, weights: Tensor, states: list[Tensor], hyperparameters: Tensor, seed_and_step: Tensor,
    iteration: Tensor | None, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor],
    batch_sizes: list[int], report: Tensor | None, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parsed = OperatorSpec.from_json(spec)
    with _device_of(weights):
        return forward(
            weights=weights,
            hyperparameters=hyperparameters,
            seed_and_step=seed_and_step,
            iteration=iteration,
            bags=_bags(indices, offsets, sample_weights, vbe),
            report=report,
            shape=BatchShape.of(offsets, batch_sizes, parsed),
            spec=parsed,
        )


def _embedding_bags_backward(
    grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    counts: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor],
    batch_sizes: list[int], trains: bool, needs_sample_weights_grad: bool, spec: str,
) -> Tensor:  # fmt: skip
    parsed = OperatorSpec.from_json(spec)
    with _device_of(weights):
        sample_weights_grad = backward(
            grad_output=grad_output,
            weights=weights,
            states=states,
            seed_and_step=seed_and_step,
            stamp=stamp,
            counts=counts,
            bags=_bags(indices, offsets, sample_weights, vbe),
            shape=BatchShape.of(offsets, batch_sizes, parsed),
            trains=trains,
            needs_sample_weights_grad=needs_sample_weights_grad,
            spec=parsed,
        )
    return stamp.new_empty(0, dtype=torch.float32) if sample_weights_grad is None else sample_weights_grad


_library.impl("place_bags", _place_bags, "CompositeExplicitAutograd")
_library.impl("place_entries", _place_entries, "CompositeExplicitAutograd")
_library.impl("check_bounds", _check_bounds, "CompositeExplicitAutograd")
_library.impl("embedding_bags", _embedding_bags, "CompositeExplicitAutograd")
_library.impl("embedding_bags_backward", _embedding_bags_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fbtriton::place_bags", lib=_library)
def _fake_place_bags(offsets: Tensor, batch_sizes: list[int], spec: str) -> list[Tensor]:
    num_features, num_bags = len(OperatorSpec.from_json(spec).feature_tables), sum(batch_sizes)
    sizes = {
        "first_bags": num_features + 1,
        "bag_features": num_bags,
        "output_offsets": num_bags,
        "bucket_bags": num_bags,
    }
    dtypes = {"bag_features": torch.int32, "bucket_bags": torch.int32}
    return [offsets.new_empty(size, dtype=dtypes.get(name, torch.int64)) for name, size in sizes.items()]


@torch.library.register_fake("fbtriton::place_entries", lib=_library)
def _fake_place_entries(indices: Tensor, offsets: Tensor, spec: str) -> list[Tensor]:
    num_features, num_entries = len(OperatorSpec.from_json(spec).feature_tables), indices.numel()
    return [
        offsets.new_empty(num_entries + 1),
        offsets.new_empty(num_features + 1, dtype=torch.int64),
        offsets.new_empty(num_entries, dtype=torch.int32),
        offsets.new_empty(num_entries, dtype=torch.int64),
        offsets.new_empty(num_entries, dtype=torch.int32),
    ]


@torch.library.register_fake("fbtriton::check_bounds", lib=_library)
def _fake_check_bounds(
    indices: Tensor, offsets: Tensor, vbe: list[Tensor], batch_sizes: list[int], report: Tensor, spec: str
) -> Tensor:
    return torch.empty_like(offsets)


@torch.library.register_fake("fbtriton::embedding_bags", lib=_library)
def _fake_embedding_bags(
    anchor: Tensor, weights: Tensor, states: list[Tensor], hyperparameters: Tensor, seed_and_step: Tensor,
    iteration: Tensor | None, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor],
    batch_sizes: list[int], report: Tensor | None, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parsed = OperatorSpec.from_json(spec)
    shape = BatchShape.of(offsets, batch_sizes, parsed)
    output = weights.new_empty(shape.output_shape, dtype=parsed.torch_output_dtype)
    repaired = offsets.new_empty(0) if report is None else torch.empty_like(offsets)
    stamp = seed_and_step.new_empty(stamp_size(hyperparameters, iteration))
    size = [0]
    if uses_kernels(weights.device):
        weighted = sample_weights is not None
        size = kept_counts(parsed, indices.numel(), shape, weighted=weighted, vbe=bool(vbe))
    return output, stamp, repaired, weights.new_empty(size, dtype=torch.uint8)


@torch.library.register_fake("fbtriton::embedding_bags_backward", lib=_library)
def _fake_embedding_bags_backward(
    grad_output: Tensor, weights: Tensor, states: list[Tensor], seed_and_step: Tensor, stamp: Tensor,
    counts: Tensor, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor],
    batch_sizes: list[int], trains: bool, needs_sample_weights_grad: bool, spec: str,
) -> Tensor:  # fmt: skip
    size = indices.numel() if needs_sample_weights_grad else 0
    return stamp.new_empty(size, dtype=torch.float32)


class _EmbeddingBags(torch.autograd.Function):
    """The op below autograd, and the backward that updates the tables."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, sample_weights: Tensor | None, weights: Tensor, states: list[Tensor],
        hyperparameters: Tensor, seed_and_step: Tensor, iteration: Tensor | None, indices: Tensor, offsets: Tensor,
        vbe: list[Tensor], batch_sizes: list[int], report: Tensor | None, spec: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        with torch._C._AutoDispatchBelowAutograd():
            output, stamp, repaired, counts = torch.ops.fbtriton.embedding_bags(
                anchor, weights, states, hyperparameters, seed_and_step, iteration, indices, offsets, sample_weights,
                vbe, batch_sizes, report, spec,
            )  # fmt: skip
        ctx.mark_non_differentiable(stamp, repaired, counts)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.batch_sizes, ctx.num_states = spec, batch_sizes, len(states)
        offsets = offsets if report is None else repaired
        ctx.save_for_backward(weights, seed_and_step, stamp, counts, indices, offsets, sample_weights, *states, *vbe)
        return output, stamp, repaired, counts

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Any, ...]:  # type: ignore[override]
        weights, seed_and_step, stamp, counts, indices, offsets, sample_weights, *others = ctx.saved_tensors
        states, vbe = others[: ctx.num_states], others[ctx.num_states :]
        sample_grad = None
        if grad_output is not None:
            trains, needed = ctx.needs_input_grad[:2]
            result = torch.ops.fbtriton.embedding_bags_backward(
                grad_output, weights, states, seed_and_step, stamp, counts, indices, offsets, sample_weights, vbe,
                ctx.batch_sizes, trains, needed, ctx.spec,
            )  # fmt: skip
            sample_grad = result if needed else None
        return None, sample_grad, *[None] * 11


def _embedding_bags_autograd(
    anchor: Tensor, weights: Tensor, states: list[Tensor], hyperparameters: Tensor, seed_and_step: Tensor,
    iteration: Tensor | None, indices: Tensor, offsets: Tensor, sample_weights: Tensor | None, vbe: list[Tensor],
    batch_sizes: list[int], report: Tensor | None, spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _EmbeddingBags.apply(  # type: ignore[no-any-return, no-untyped-call]
        anchor, sample_weights, weights, states, hyperparameters, seed_and_step, iteration, indices, offsets, vbe,
        batch_sizes, report, spec,
    )  # fmt: skip


_library.impl("embedding_bags", _embedding_bags_autograd, "Autograd")


def table_batched_embedding_bags(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    *,
    spec: OperatorSpec,
    states: list[Tensor],
    hyperparameters: Tensor,
    seed_and_step: Tensor,
    anchor: Tensor,
    bounds_report: Tensor,
    iteration: Tensor | None = None,
    batch_sizes: Sequence[Sequence[int]] | None = None,
    total_unique_indices: int | None = None,
) -> Tensor:
    """Pool the rows of many tables; the backward updates them in place with a fused optimizer.

        output[b, columns of feature f] = sum (or mean) over e in bag (f, b) of w_e * table[f][indices[e]]

    with w_e = 1 without per_sample_weights; a mean divides by the number of ids in the bag. Accumulation is fp32. With
    pooling "none" there are no bags and no per-sample weights: output[e] = table of e's feature[indices[e]].

    `TableBatchedEmbeddingBags` is a shell around this function that owns the tensors.

    Args:
        weights: all tables, flat, laid out by `spec.layout` (`weight_offsets`), dtype `spec.weights_dtype`.
        indices: [N] int32 or int64. -1 is a pruned entry: it adds zero and trains nothing, but counts in a mean.
            Entries past offsets[-1] are padding.
        offsets: [F * B + 1] int32 or int64, feature-major.
        per_sample_weights: [N] floating point, optional; differentiable.
        spec: what is fixed: tables, pooling, dtypes, optimizer.
        states: the optimizer's state tensors: [rows of all tables], or laid out like the weights.
        hyperparameters: fp32 device tensor; learning rate first. Read by the forward, so a backward uses what was
            set when its forward ran.
        seed_and_step: int64 [2] device tensor {seed, step} of stochastic rounding.
        anchor: a tensor that requires gradients if the tables are to be trained; its value is not used. Without an
            optimizer it is the parameter [rows of all tables, dim] that gets the gradient; weights is a view of it.
        bounds_report: int64 [7] device tensor, see `fbtriton.bounds_check`.
        iteration: int64 [1] device tensor, if the optimizer counts iterations: the forwards so far that were to train.
        batch_sizes: for each feature a list of batch sizes, one for each rank, which may differ between features
            (VBE; FBGEMM's `batch_size_per_feature_per_rank`). offsets then has one more element than their sum.
        total_unique_indices: without an optimizer, the number of different rows that the batch looks up, as FBGEMM
            has it. Fewer would leave rows out. Not given, the backward waits for the device to know it.

    Returns:
        [B, sum of feature dims] of `spec.output_dtype`; with batch_sizes one dimension: rank by rank, feature by
        feature, sample by sample, as FBGEMM has it; with pooling "none" [N, dim], zeros for padding and pruned entries.

    Mutates:
        bounds_report and iteration in the forward; weights, states and the step in the backward. The caller's
        indices, offsets and per_sample_weights are never written.

    Raises:
        ValueError: a tensor has a wrong dtype, shape or device; in bounds check mode "fatal" on a CPU also a bad id
            or offset (a CUDA device stops with a device assertion).

    Does not synchronise with the device.
    """
    check_ids_and_offsets(indices, offsets, weights.device)
    if weights.dtype != spec.torch_weights_dtype:
        raise ValueError(f"weights must be {spec.torch_weights_dtype}, as constructed, got {weights.dtype}")
    if per_sample_weights is not None:
        check_sample_weights(per_sample_weights, indices)
        per_sample_weights = per_sample_weights.float().contiguous()
    if total_unique_indices is not None:
        check_unique(total_unique_indices, indices, spec)
    flat_sizes = check_bags(offsets, batch_sizes, len(spec.feature_tables))
    text = spec.text
    indices, offsets = indices.contiguous(), offsets.contiguous()
    if not spec.pooled and (per_sample_weights is not None or batch_sizes is not None):
        raise ValueError("per_sample_weights and batch_sizes must be None with pooling 'none': nothing is summed")
    vbe = torch.ops.fbtriton.place_bags(offsets, flat_sizes, text) if batch_sizes is not None else []
    fused = spec.bounds_check != "off" and spec.fused_bounds_check and spec.pooled
    if spec.bounds_check != "off" and not fused:
        offsets = torch.ops.fbtriton.check_bounds(indices, offsets, vbe, flat_sizes, bounds_report, text)
    if not spec.pooled:
        offsets, *vbe = torch.ops.fbtriton.place_entries(indices, offsets, text)
    if spec.optimizer == "none":
        if torch.compiler.is_compiling():
            raise NotImplementedError("NoOptimizer gives sparse gradients, which torch.compile does not take")
        output = EmbeddingBagsWithGradient.apply(  # type: ignore[no-untyped-call]
            anchor, per_sample_weights, hyperparameters, seed_and_step, indices, offsets, vbe, flat_sizes,
            bounds_report if fused else None, total_unique_indices, text,
        )  # fmt: skip
        return output if spec.pooled else output.view(indices.numel(), spec.layout.dims[0])
    if iteration is not None and not (torch.is_grad_enabled() and anchor.requires_grad):
        iteration = None
    # Outside a trace the op would only call this, after it has looked at every argument.
    embedding_bags = torch.ops.fbtriton.embedding_bags if torch.compiler.is_compiling() else _embedding_bags_autograd
    output, *_ = embedding_bags(
        anchor, weights, states, hyperparameters, seed_and_step, iteration, indices, offsets, per_sample_weights,
        vbe, flat_sizes, bounds_report if fused else None, text,
    )  # fmt: skip
    return output if spec.pooled else output.view(indices.numel(), spec.layout.dims[0])
