"""indices, offsets -> gather -> output, with the stamp that the backward reads."""

from __future__ import annotations

from torch import Tensor

from fbtriton import reference
from fbtriton.config import uses_kernels
from fbtriton.forward.gather import gather
from fbtriton.layout import Bags, OperatorSpec
from fbtriton.optim import make_stamp


def forward(
    *, weights: Tensor, hyperparameters: Tensor, seed_and_step: Tensor, bags: Bags, batch_size: int, spec: OperatorSpec
) -> tuple[Tensor, Tensor]:
    """The pooled rows [B, columns] and the stamp. Bags have passed the bounds check."""
    if batch_size == 0 or not uses_kernels(weights.device):
        output = reference.forward(weights=weights, bags=bags, batch_size=batch_size, spec=spec)
        return output, make_stamp(hyperparameters, seed_and_step)
    output = weights.new_empty(batch_size, spec.layout.columns[-1], dtype=spec.torch_output_dtype)
    stamp = seed_and_step.new_empty(2 + hyperparameters.numel())
    gather(
        out=output,
        stamp=stamp,
        weights=weights,
        hyperparameters=hyperparameters,
        seed_and_step=seed_and_step,
        bags=bags,
        batch_size=batch_size,
        spec=spec,
    )
    return output, stamp
