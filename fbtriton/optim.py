"""Optimizers: what a user passes, how a kernel updates a row, and the same formula in PyTorch.

A new optimizer is one class here: its hyperparameters, its states, two device functions and the reference.
The device functions get a tile of rows:

    load_state(states, state_row, live) -> state
        issued before the gradients are summed, so that its latency is hidden
    update(weight, grad, state, states, state_row, live, stamp_ptr, DIM) -> new weight
        stores the new state itself

with weight and grad [R, BLOCK_D] fp32 (grad is the exact sum over the run, 0 in masked columns), states an
`OptimizerStates`, state_row and live [R].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.rows import hyperparameter


class OptimizerStates(NamedTuple):
    """The flat state tensors that a kernel sees; None = the optimizer has no such state."""

    first: Tensor | None
    second: Tensor | None


class StateSpec(NamedTuple):
    """One state tensor: its name in `state_dict`, and whether it has one element per row or per weight."""

    name: str
    rowwise: bool


@triton.jit
def load_no_state(states, state_row, live):
    return state_row


@triton.jit
def update_sgd(weight, grad, state, states, state_row, live, stamp_ptr, DIM: tl.constexpr):
    return weight - hyperparameter(stamp_ptr, 0) * grad


@triton.jit
def load_row_state(states, state_row, live):
    return tl.load(states.first + state_row, mask=live, other=0.0)


@triton.jit
def update_rowwise_adagrad(weight, grad, state, states, state_row, live, stamp_ptr, DIM: tl.constexpr):
    lr = hyperparameter(stamp_ptr, 0)
    eps = hyperparameter(stamp_ptr, 1)
    total = state + tl.sum(grad * grad, axis=1) / DIM
    tl.store(states.first + state_row, total, mask=live)
    return weight - tl.div_rn(lr, tl.sqrt_rn(total) + eps)[:, None] * grad


def _check_hyperparameters(optimizer: Any) -> None:
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{field.name} must be a finite number >= 0, got {value!r}")


@dataclass(frozen=True)
class SGD:
    """w -= lr * g, with g the gradient summed over all entries of the row.

    Args:
        lr: learning rate.

    Raises:
        ValueError: lr is negative or not finite.
    """

    lr: float

    name: ClassVar[str] = "sgd"
    states: ClassVar[tuple[StateSpec, ...]] = ()
    load_state: ClassVar[Any] = load_no_state
    update: ClassVar[Any] = update_sgd

    def __post_init__(self) -> None:
        _check_hyperparameters(self)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """What kernels read from the device; the learning rate is always first."""
        return (self.lr,)

    @property
    def initial_states(self) -> tuple[float, ...]:
        return ()

    @staticmethod
    def reference(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
        """weight, grad [n, D] fp64 -> new weight; states are updated in place."""
        (lr,) = hyperparameters
        return weight - lr * grad


@dataclass(frozen=True)
class RowwiseAdagrad:
    """Exact row-wise Adagrad, in FBGEMM's formula (EXACT_ROWWISE_ADAGRAD without weight decay):

        v += mean over the row of g^2;   w -= lr / (sqrt(v) + eps) * g

    with g the gradient summed over all entries of the row and one v for each row.

    Args:
        lr: learning rate.
        eps: added to the square root.
        initial_accumulator: v at the start.

    Raises:
        ValueError: an argument is negative or not finite.
    """

    lr: float
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    name: ClassVar[str] = "rowwise_adagrad"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", rowwise=True),)
    load_state: ClassVar[Any] = load_row_state
    update: ClassVar[Any] = update_rowwise_adagrad

    def __post_init__(self) -> None:
        _check_hyperparameters(self)

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """What kernels read from the device; the learning rate is always first."""
        return (self.lr, self.eps)

    @property
    def initial_states(self) -> tuple[float, ...]:
        return (self.initial_accumulator,)

    @staticmethod
    def reference(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
        """weight, grad [n, D] fp64, states [v [n] fp64] -> new weight; states are updated in place."""
        lr, eps = hyperparameters
        (v,) = states
        v += grad.square().mean(dim=1)
        return weight - lr * grad / (v.sqrt() + eps)[:, None]


Optimizer = SGD | RowwiseAdagrad
OPTIMIZERS: dict[str, type[SGD] | type[RowwiseAdagrad]] = {kind.name: kind for kind in (SGD, RowwiseAdagrad)}


def read_stamp(stamp: Tensor) -> tuple[int, int, list[float]]:
    """A stamp (see `fbtriton.rows`) as (step, seed, hyperparameters). Waits for the device: reference only."""
    step, seed, *_ = stamp.tolist()
    return step, seed, stamp[2:].to(torch.int32).view(torch.float32).tolist()


def make_stamp(hyperparameters: Tensor, seed_and_step: Tensor) -> Tensor:
    """The stamp of `fbtriton.rows`, built by PyTorch."""
    bits = hyperparameters.view(torch.int32).to(torch.int64)
    return torch.cat([seed_and_step.flip(0), bits])
