"""Adam with decoupled weight decay, with one second moment for each weight or for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.optim.base import Optimizer, RowUpdate, StateSpec, load_row_state, store_row_state
from fbtriton.rows import hyperparameter, load_tile, store_tile

# Hyperparameters of all of this family: lr, beta1, beta2, eps, weight_decay; the stamp adds 1 - beta1^t, 1 - beta2^t.


@triton.jit
def load_moments(states, state_row, weight_offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """-> (first moment [R, BLOCK_D], second moment [R, BLOCK_D])"""
    first = load_tile(states.first, weight_offset, live, DIM, BLOCK_D)
    return first, load_tile(states.second, weight_offset, live, DIM, BLOCK_D)


@triton.jit
def load_rowwise_moments(states, state_row, weight_offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """-> (first moment [R, BLOCK_D], second moment [R, 1])"""
    first = load_tile(states.first, weight_offset, live, DIM, BLOCK_D)
    return first, load_row_state(states.second, state_row, live)[:, None]


@triton.jit
def adam_direction(grad, first, second, square, stamp_ptr):
    """The step before weight decay and learning rate, and the new moments. square: of grad, or its mean over the row"""
    beta1 = hyperparameter(stamp_ptr, 1)
    beta2 = hyperparameter(stamp_ptr, 2)
    eps = hyperparameter(stamp_ptr, 3)
    first = beta1 * first + (1.0 - beta1) * grad
    second = beta2 * second + (1.0 - beta2) * square
    first_scale = tl.div_rn(1.0, hyperparameter(stamp_ptr, 5))
    second_scale = tl.div_rn(1.0, hyperparameter(stamp_ptr, 6))
    root = tl.sqrt_rn(second * second_scale) + eps
    return tl.div_rn(first * first_scale, root + tl.zeros_like(first)), first, second


@triton.jit
def step_moments(grad, state, states, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the new moments of each weight. -> `adam_direction`"""
    direction, first, second = adam_direction(grad, state[0], state[1], grad * grad, stamp_ptr)
    store_tile(states.first, weight_offset, first, live, DIM, BLOCK_D)
    store_tile(states.second, weight_offset, second, live, DIM, BLOCK_D)
    return direction


@triton.jit
def step_rowwise_moments(
    grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """`step_moments` with one second moment for each row."""
    square = tl.sum(grad * grad, axis=1, keep_dims=True) / DIM
    direction, first, second = adam_direction(grad, state[0], state[1], square, stamp_ptr)
    store_tile(states.first, weight_offset, first, live, DIM, BLOCK_D)
    store_row_state(states.second, state_row, tl.sum(second, axis=1), live)
    return direction


@triton.jit
def decayed_step(weight, direction, stamp_ptr):
    """The new row."""
    return weight - hyperparameter(stamp_ptr, 0) * (direction + hyperparameter(stamp_ptr, 4) * weight)


@triton.jit
def update_adam(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    direction = step_moments(grad, state, states, weight_offset, live, stamp_ptr, DIM, BLOCK_D)
    return decayed_step(weight, direction, stamp_ptr)


@triton.jit
def update_partial_rowwise_adam(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    direction = step_rowwise_moments(grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM, BLOCK_D)
    return decayed_step(weight, direction, stamp_ptr)


def reference_direction(grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    """The step before weight decay and learning rate; states are updated in place."""
    _, beta1, beta2, eps, _, correction1, correction2 = hyperparameters
    m, v = states
    square = grad.square()
    if v.dim() == 1:
        square = square.mean(dim=1)
    m.mul_(beta1).add_((1 - beta1) * grad)
    v.mul_(beta2).add_((1 - beta2) * square)
    root = (v / correction2).sqrt() + eps
    return (m / correction1) / (root[:, None] if v.dim() == 1 else root)


def reference_adam(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    lr, weight_decay = hyperparameters[0], hyperparameters[4]
    return weight - lr * (reference_direction(grad, states, hyperparameters) + weight_decay * weight)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, ICLR 2015) with decoupled weight decay (Loshchilov and Hutter, ICLR 2019), as FBGEMM's ADAM
    has it:

        m = beta1 * m + (1 - beta1) * g;   v = beta2 * v + (1 - beta2) * g^2
        w -= lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w)

    with g the gradient summed over all entries of the row, one m and one v for each weight, and t the number of
    forwards with gradients on so far, for all rows alike. Rows that are not in the batch do not change, nor do their
    m and v.

    Args:
        lr: learning rate.
        beta1, beta2: in [0, 1).
        eps: added to the square root.
        weight_decay: times lr, the share of a row that it loses in a step.
        max_gradient: see `Optimizer`.
        exp_avg_dtype, exp_avg_sq_dtype: what m and v are stored in, float32 or bfloat16 (rounded to nearest). A step
            uses the new m and v before they are rounded.

    Raises:
        ValueError: an argument is out of its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32

    name: ClassVar[str] = "adam"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("lr", "beta1", "beta2", "eps", "weight_decay")
    states: ClassVar[tuple[StateSpec, ...]] = (
        StateSpec("exp_avg", rowwise=False), StateSpec("exp_avg_sq", rowwise=False),
    )  # fmt: skip
    counts_iterations: ClassVar[bool] = True
    variants: ClassVar[dict[str, RowUpdate]] = {"adam": RowUpdate(load_moments, update_adam, reference_adam)}


@dataclass(frozen=True)
class PartialRowwiseAdam(Adam):
    """`Adam` with one v for each row, as FBGEMM's PARTIAL_ROWWISE_ADAM has it:

        v = beta2 * v + (1 - beta2) * mean over the row of g^2

    Arguments and errors are those of `Adam`.
    """

    name: ClassVar[str] = "partial_rowwise_adam"
    states: ClassVar[tuple[StateSpec, ...]] = (
        StateSpec("exp_avg", rowwise=False), StateSpec("exp_avg_sq", rowwise=True),
    )  # fmt: skip
    variants: ClassVar[dict[str, RowUpdate]] = {
        "partial_rowwise_adam": RowUpdate(load_rowwise_moments, update_partial_rowwise_adam, reference_adam)
    }
