"""Adagrad with one accumulator for each weight or for each row."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.optim.base import Optimizer, RowUpdate, StateSpec, load_row_state, store_row_state
from fbtriton.optim.sgd import load_first_tile, row_norms
from fbtriton.rows import hyperparameter, store_tile


@triton.jit
def update_adagrad(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    lr = hyperparameter(stamp_ptr, 0)
    eps = hyperparameter(stamp_ptr, 1)
    total = state + grad * grad
    store_tile(states.first, weight_offset, total, live, DIM, BLOCK_D)
    return weight - tl.div_rn(lr * grad, tl.sqrt_rn(total) + eps)


def reference_adagrad(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    lr, eps = hyperparameters
    (v,) = states
    v += grad.square()
    return weight - lr * grad / (v.sqrt() + eps)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011), as FBGEMM's EXACT_ADAGRAD has it:

        v += g^2;   w -= lr * g / (sqrt(v) + eps)

    with g the gradient summed over all entries of the row and one v for each weight.

    Args:
        lr: learning rate.
        eps: added to the square root.
        initial_accumulator: v at the start.
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: an argument is negative or not finite.
    """

    lr: float
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    name: ClassVar[str] = "adagrad"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ("lr", "eps")
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", rowwise=False),)
    variants: ClassVar[dict[str, RowUpdate]] = {
        "adagrad": RowUpdate(load_first_tile, update_adagrad, reference_adagrad)
    }

    @property
    def initial_states(self) -> tuple[float, ...]:
        return (self.initial_accumulator,)


@triton.jit
def load_rowwise_adagrad(states, state_row, weight_offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    return load_row_state(states.first, state_row, live)


@triton.jit
def rowwise_adagrad_step(
    weight, grad, state, states, state_row, live, stamp_ptr,
    DIM: tl.constexpr, DECAY: tl.constexpr, MAX_NORM: tl.constexpr,
):  # fmt: skip
    """DECAY is the weight decay mode, MAX_NORM whether rows are shortened."""
    lr = hyperparameter(stamp_ptr, 0)
    eps = hyperparameter(stamp_ptr, 1)
    decayed = grad
    if DECAY == "l2":
        decayed += hyperparameter(stamp_ptr, 2) * weight
    total = state + tl.sum(decayed * decayed, axis=1) / DIM
    store_row_state(states.first, state_row, total, live)
    rate = tl.div_rn(lr, tl.sqrt_rn(total) + eps)
    if DECAY == "decoupled":
        weight *= 1.0 - lr * hyperparameter(stamp_ptr, 2)
    updated = weight - rate[:, None] * decayed
    if MAX_NORM:
        norm = row_norms(updated)
        limit = hyperparameter(stamp_ptr, 3)
        too_long = norm > limit
        factor = tl.div_rn(limit + tl.zeros_like(norm), tl.where(too_long, norm, 1.0))
        updated *= tl.where(too_long, factor, 1.0)[:, None]
    return updated


@triton.jit
def update_rowwise_adagrad(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "none", False)


@triton.jit
def update_rowwise_adagrad_l2(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "l2", False)


@triton.jit
def update_rowwise_adagrad_decoupled(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "decoupled", False)


@triton.jit
def update_rowwise_adagrad_max_norm(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "none", True)


@triton.jit
def update_rowwise_adagrad_l2_max_norm(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "l2", True)


@triton.jit
def update_rowwise_adagrad_decoupled_max_norm(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    return rowwise_adagrad_step(weight, grad, state, states, state_row, live, stamp_ptr, DIM, "decoupled", True)


def reference_rowwise_adagrad(
    weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float], *, mode: str, shortens: bool
) -> Tensor:
    lr, eps, weight_decay, max_norm = [*hyperparameters, 0.0, 0.0][:4]
    (v,) = states
    if mode == "l2":
        grad = grad + weight_decay * weight
    v += grad.square().mean(dim=1)
    if mode == "decoupled":
        weight = weight * (1 - lr * weight_decay)
    updated = weight - lr * grad / (v.sqrt() + eps)[:, None]
    if shortens:
        norm = updated.norm(dim=1, keepdim=True)
        updated = torch.where(norm > max_norm, updated * (max_norm / norm), updated)
    return updated


WEIGHT_DECAY_MODES = ("none", "l2", "decoupled")


def _variant(mode: str, shortens: bool) -> str:
    return "_".join(["rowwise_adagrad", *[mode] * (mode != "none"), *["max_norm"] * shortens])


def _variants() -> dict[str, RowUpdate]:
    updates = [
        update_rowwise_adagrad, update_rowwise_adagrad_max_norm,
        update_rowwise_adagrad_l2, update_rowwise_adagrad_l2_max_norm,
        update_rowwise_adagrad_decoupled, update_rowwise_adagrad_decoupled_max_norm,
    ]  # fmt: skip
    options = itertools.product(WEIGHT_DECAY_MODES, (False, True))
    return {
        _variant(mode, shortens): RowUpdate(
            load_rowwise_adagrad, update, functools.partial(reference_rowwise_adagrad, mode=mode, shortens=shortens)
        )
        for (mode, shortens), update in zip(options, updates, strict=True)
    }


@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """Exact row-wise Adagrad, in the formula of FBGEMM's EXACT_ROWWISE_ADAGRAD:

        h = g + weight_decay * w   with "l2",   h = g   otherwise
        v += mean over the row of h^2
        w *= 1 - lr * weight_decay   with "decoupled"
        w -= lr / (sqrt(v) + eps) * h
        w *= max_norm / |w|   if |w| > max_norm > 0

    with g the gradient summed over all entries of the row and one v for each row. Only rows of the batch decay or are
    shortened. The new row is rounded once, when all this is done; FBGEMM rounds it before it measures the norm, and
    the shortened row again.

    Args:
        lr: learning rate.
        eps: added to the square root.
        initial_accumulator: v at the start.
        weight_decay: must be 0 if the mode is "none".
        weight_decay_mode: "none", "l2" or "decoupled".
        max_norm: the longest that an updated row may be; 0 = no limit.
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: an argument is negative, not finite, or not one of its choices.
    """

    lr: float
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    weight_decay_mode: str = "none"
    max_norm: float = 0.0

    name: ClassVar[str] = "rowwise_adagrad"
    states: ClassVar[tuple[StateSpec, ...]] = (StateSpec("sum", rowwise=True),)
    variants: ClassVar[dict[str, RowUpdate]] = _variants()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay_mode not in WEIGHT_DECAY_MODES:
            choices = ", ".join(WEIGHT_DECAY_MODES)
            raise ValueError(f"weight_decay_mode must be one of {choices}, got {self.weight_decay_mode!r}")
        if self.weight_decay_mode == "none" and self.weight_decay:
            raise ValueError(f'weight_decay must be 0 if weight_decay_mode is "none", got {self.weight_decay!r}')

    @property
    def variant(self) -> str:
        return _variant(self.weight_decay_mode, self.max_norm > 0)

    @property
    def hyperparameter_names(self) -> tuple[str, ...]:  # type: ignore[override]
        plain = self.variant == self.name
        return ("lr", "eps") if plain else ("lr", "eps", "weight_decay", "max_norm")

    @property
    def initial_states(self) -> tuple[float, ...]:
        return (self.initial_accumulator,)
