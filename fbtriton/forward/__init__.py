"""indices, offsets -> gather -> output, with the stamp that the backward reads."""

from __future__ import annotations

from torch import Tensor

from fbtriton import reference
from fbtriton.batch import BatchShape
from fbtriton.config import uses_kernels
from fbtriton.forward.gather import gather
from fbtriton.layout import Bags, OperatorSpec
from fbtriton.optim import make_stamp


def forward(
    *,
    weights: Tensor,
    hyperparameters: Tensor,
    seed_and_step: Tensor,
    bags: Bags,
    shape: BatchShape,
    spec: OperatorSpec,
) -> tuple[Tensor, Tensor]:
    """The pooled rows, of `shape.output_shape`, and the stamp. Bags have passed the bounds check."""
    if shape.num_bags == 0 or not uses_kernels(weights.device):
        output = reference.forward(weights=weights, bags=bags, shape=shape, spec=spec)
        return output, make_stamp(hyperparameters, seed_and_step)
    output = weights.new_empty(shape.output_shape, dtype=spec.torch_output_dtype)
    stamp = seed_and_step.new_empty(2 + hyperparameters.numel())
    gather(
        out=output,
        stamp=stamp,
        weights=weights,
        hyperparameters=hyperparameters,
        seed_and_step=seed_and_step,
        bags=bags,
        shape=shape,
        spec=spec,
    )
    return output, stamp
