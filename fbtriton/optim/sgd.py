"""SGD, and SGD with momentum and layer-wise rates (LARS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.optim.base import Optimizer, RowUpdate, StateSpec, load_no_state
from fbtriton.rows import hyperparameter, load_tile, store_tile


@triton.jit
def update_sgd(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return weight - hyperparameter(stamp_ptr, 0) * grad


@triton.jit
def load_first_tile(states, state_row, weight_offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    return load_tile(states.first, weight_offset, live, DIM, BLOCK_D)


@triton.jit
def row_norms(tile):
    """[R, BLOCK_D] -> [R]"""
    return tl.sqrt_rn(tl.sum(tile * tile, axis=1))


@triton.jit
def update_lars_sgd(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    lr = hyperparameter(stamp_ptr, 0)
    momentum = hyperparameter(stamp_ptr, 1)
    eta = hyperparameter(stamp_ptr, 2)
    weight_decay = hyperparameter(stamp_ptr, 3)
    weight_norm = row_norms(weight)
    divisor = row_norms(grad) + weight_decay * weight_norm
    moves = divisor != 0.0  # otherwise gradient and decay are 0, and any rate will do
    rate = tl.div_rn(lr * eta * weight_norm, tl.where(moves, divisor, 1.0))
    moved = momentum * state + rate[:, None] * (grad + weight_decay * weight)
    store_tile(states.first, weight_offset, moved, live, DIM, BLOCK_D)
    return weight - moved


def reference_sgd(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    (lr,) = hyperparameters
    return weight - lr * grad


def reference_lars_sgd(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    lr, momentum, eta, weight_decay = hyperparameters
    (m,) = states
    weight_norm = weight.norm(dim=1, keepdim=True)
    divisor = grad.norm(dim=1, keepdim=True) + weight_decay * weight_norm
    rate = lr * eta * weight_norm / torch.where(divisor == 0, 1.0, divisor)
    m.mul_(momentum).add_(rate * (grad + weight_decay * weight))
    return weight - m


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= lr * g, with g the gradient summed over all entries of the row (FBGEMM's EXACT_SGD).

    Args:
        lr: learning rate.
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: an argument is negative or not finite.
    """

    lr: float

    name: ClassVar[str] = "sgd"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("lr",)
    variants: ClassVar[dict[str, RowUpdate]] = {"sgd": RowUpdate(load_no_state, update_sgd, reference_sgd)}


@dataclass(frozen=True)
class LarsSGD(Optimizer):
    """LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017) with a row in the place
    of a layer, in the order of operations of FBGEMM's LARS_SGD:

        rate = lr * eta * |w| / (|g| + weight_decay * |w|)
        m = momentum * m + rate * (g + weight_decay * w);   w -= m

    with g the gradient summed over all entries of the row and one m for each weight. A row of zeros has the rate 0 and
    stays as it is. Where the divisor is 0 the rate does not matter, and m stays finite; FBGEMM makes it NaN.

    Args:
        lr: learning rate.
        momentum: in [0, 1).
        eta: trust coefficient.
        weight_decay: factor of the weights beside the gradient.
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: an argument is out of its range.
    """

    lr: float
    momentum: float = 0.9
    eta: float = 0.001
    weight_decay: float = 0.0

    name: ClassVar[str] = "lars_sgd"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("lr", "momentum", "eta", "weight_decay")
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("momentum", rowwise=False),)
    variants: ClassVar[dict[str, RowUpdate]] = {
        "lars_sgd": RowUpdate(load_first_tile, update_lars_sgd, reference_lars_sgd)
    }
