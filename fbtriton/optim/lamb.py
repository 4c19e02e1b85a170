"""LAMB: Adam's step, scaled to the length of the row; with one second moment for each weight or for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.optim.adam import (
    load_moments,
    load_rowwise_moments,
    reference_direction,
    step_moments,
    step_rowwise_moments,
)
from fbtriton.optim.base import Optimizer, RowUpdate, StateSpec
from fbtriton.optim.sgd import row_norms
from fbtriton.rows import hyperparameter, tile_mask


@triton.jit
def scaled_step(weight, direction, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The new row; direction is Adam's, before weight decay and learning rate."""
    step = direction + hyperparameter(stamp_ptr, 4) * weight
    step = tl.where(tile_mask(live, DIM, BLOCK_D), step, 0.0)  # with eps 0 masked columns hold 0 / 0
    step_norm = row_norms(step)
    moves = step_norm != 0.0
    scale = tl.div_rn(row_norms(weight), tl.where(moves, step_norm, 1.0))
    return weight - (hyperparameter(stamp_ptr, 0) * scale)[:, None] * step


@triton.jit
def update_lamb(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    direction = step_moments(grad, state, states, weight_offset, live, stamp_ptr, DIM, BLOCK_D)
    return scaled_step(weight, direction, live, stamp_ptr, DIM, BLOCK_D)


@triton.jit
def update_partial_rowwise_lamb(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    direction = step_rowwise_moments(grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM, BLOCK_D)
    return scaled_step(weight, direction, live, stamp_ptr, DIM, BLOCK_D)


def reference_lamb(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    lr, weight_decay = hyperparameters[0], hyperparameters[4]
    step = reference_direction(grad, states, hyperparameters) + weight_decay * weight
    step_norm = step.norm(dim=1, keepdim=True)
    scale = weight.norm(dim=1, keepdim=True) / torch.where(step_norm == 0, 1.0, step_norm)
    return weight - lr * scale * step


@dataclass(frozen=True)
class Lamb(Optimizer):
    """LAMB (You et al., ICLR 2020) with a row in the place of a layer, as FBGEMM's LAMB has it:

        m = beta1 * m + (1 - beta1) * g;   v = beta2 * v + (1 - beta2) * g^2
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w -= lr * |w| / |r| * r

    with g, m, v and t as in `Adam`. A row of zeros never moves, so fill the tables before training. Where r is 0 the
    row stays as it is; FBGEMM makes it NaN.

    Args:
        lr: learning rate.
        beta1, beta2: in [0, 1).
        eps: added to the square root.
        weight_decay: factor of the weights beside the step.
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: an argument is out of its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "lamb"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("lr", "beta1", "beta2", "eps", "weight_decay")
    states: ClassVar[tuple[StateSpec, ...]] = (
        StateSpec("exp_avg", rowwise=False), StateSpec("exp_avg_sq", rowwise=False),
    )  # fmt: skip
    counts_iterations: ClassVar[bool] = True
    variants: ClassVar[dict[str, RowUpdate]] = {"lamb": RowUpdate(load_moments, update_lamb, reference_lamb)}


@dataclass(frozen=True)
class PartialRowwiseLamb(Lamb):
    """`Lamb` with one v for each row, as FBGEMM's PARTIAL_ROWWISE_LAMB has it:

        v = beta2 * v + (1 - beta2) * mean over the row of g^2

    Arguments and errors are those of `Lamb`.
    """

    name: ClassVar[str] = "partial_rowwise_lamb"
    states: ClassVar[tuple[StateSpec, ...]] = (
        StateSpec("exp_avg", rowwise=False), StateSpec("exp_avg_sq", rowwise=True),
    )  # fmt: skip
    variants: ClassVar[dict[str, RowUpdate]] = {
        "partial_rowwise_lamb": RowUpdate(load_rowwise_moments, update_partial_rowwise_lamb, reference_lamb)
    }
