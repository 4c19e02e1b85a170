"""What all optimizers share: the hyperparameters and states of a class, and the stamp that carries the former."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fbtriton._triton import tl, triton


class OptimizerStates(NamedTuple):
    """The flat state tensors that a kernel sees; None = the optimizer has no such state."""

    first: Tensor | None
    second: Tensor | None


class StateSpec(NamedTuple):
    """One state tensor: its name in `state_dict`, and whether it has one element per row or per weight."""

    name: str
    rowwise: bool


class RowUpdate(NamedTuple):
    """One step for the rows of a batch, as device functions (see `fbtriton.optim`) and in PyTorch."""

    load_state: Any
    update: Any
    # (weight, grad [n, D] fp64, states [n] or [n, D] fp64, hyperparameters) -> new weight; states change in place
    reference: Callable[[Tensor, Tensor, list[Tensor], list[float]], Tensor]


@triton.jit
def load_no_state(states, state_row, weight_offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    return state_row


@triton.jit
def load_row_state(state_ptr, state_row, live):
    """-> [R] fp32"""
    return tl.load(state_ptr + state_row, mask=live, other=0.0).to(tl.float32)


@triton.jit
def store_row_state(state_ptr, state_row, value, live):
    tl.store(state_ptr + state_row, value.to(state_ptr.dtype.element_ty), mask=live)


def check_range(name: str, value: Any, least: float = 0.0, below: float = math.inf) -> None:
    """Raises ValueError unless value is a number in [least, below)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < below:
        expected = f"a finite number >= {least:g}" if below == math.inf else f"a number in [{least:g}, {below:g})"
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_state_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless dtype is one that a state may have."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} must be torch.float32 or torch.bfloat16, got {dtype!r}")


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers.

    `max_gradient`, which all have, limits each element of the gradient that the backward is given to
    [-max_gradient, max_gradient], before anything is made of it (so of the gradient of the per-sample weights too);
    0 = no limit. It is FBGEMM's `gradient_clipping` with `max_gradient`. A NaN stays one.
    """

    max_gradient: float = field(default=0.0, kw_only=True)

    name: ClassVar[str]
    hyperparameter_names: ClassVar[tuple[str, ...]]  # fields that kernels read from the device; lr is first
    limits: ClassVar[dict[str, float]] = {"beta1": 1.0, "beta2": 1.0, "momentum": 1.0}  # what numbers must be below
    states: ClassVar[tuple[StateSpec, ...]] = ()
    counts_iterations: ClassVar[bool] = False  # has a count of forwards; beta1, beta2 are hyperparameters 1 and 2
    variants: ClassVar[dict[str, RowUpdate]]

    def __post_init__(self) -> None:
        for member in fields(self):
            value = getattr(self, member.name)
            if member.type == "float":
                self.check_hyperparameter(member.name, value)
            elif member.type == "torch.dtype":
                check_state_dtype(member.name, value)

    @classmethod
    def check_hyperparameter(cls, name: str, value: Any) -> None:
        """Raises ValueError if value is none that the field may have."""
        check_range(name, value, below=cls.limits.get(name, math.inf))

    @property
    def variant(self) -> str:
        """The name in `OPTIMIZERS` of what is compiled for this one."""
        return self.name

    @property
    def hyperparameters(self) -> tuple[float, ...]:
        """What kernels read from the device; the learning rate is always first."""
        return tuple(getattr(self, name) for name in self.hyperparameter_names)

    @property
    def initial_states(self) -> tuple[float, ...]:
        """What each state is filled with."""
        return (0.0,) * len(self.states)

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each state."""
        return tuple(getattr(self, f"{state.name}_dtype", torch.float32) for state in self.states)


def bias_corrections(hyperparameters: Tensor, iteration: Tensor) -> Tensor:
    """1 - beta^iteration for hyperparameters 1 and 2, fp32 [2]; computed in fp64, for small differences of large
    numbers."""
    return (1.0 - hyperparameters[1:3].double() ** iteration).float()


def make_stamp(hyperparameters: Tensor, seed_and_step: Tensor, iteration: Tensor | None = None) -> Tensor:
    """The stamp of `fbtriton.rows`, built by PyTorch; counts the iteration."""
    if iteration is not None:
        iteration.add_(1)
        hyperparameters = torch.cat([hyperparameters, bias_corrections(hyperparameters, iteration)])
    bits = hyperparameters.view(torch.int32).to(torch.int64)
    return torch.cat([seed_and_step.flip(0), bits])


def stamp_size(hyperparameters: Tensor, iteration: Tensor | None) -> int:
    """How many words the stamp has."""
    return 2 + hyperparameters.numel() + (0 if iteration is None else 2)


def read_stamp(stamp: Tensor) -> tuple[int, int, list[float]]:
    """A stamp (see `fbtriton.rows`) as (step, seed, hyperparameters, with bias corrections last where there are any).
    Waits for the device: reference only."""
    step, seed, *_ = stamp.tolist()
    return step, seed, stamp[2:].to(torch.int32).view(torch.float32).tolist()
