"""No optimizer: the rows' gradients are given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.optim.base import Optimizer, RowUpdate, load_no_state


@triton.jit
def update_none(
    weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The "new row" is the gradient; it is stored in a tensor of its own."""
    return grad


def reference_none(weight: Tensor, grad: Tensor, states: list[Tensor], hyperparameters: list[float]) -> Tensor:
    return grad


@dataclass(frozen=True)
class NoOptimizer(Optimizer):
    """The backward changes no row; it gives the weights, which are a parameter [rows of all tables, dim], a sparse
    gradient, as FBGEMM's NONE does: a row for each row of the batch, ascending, with the gradient summed in fp32 over
    all its entries and rounded once to the dtype of the weights. Any optimizer of PyTorch that takes sparse gradients
    then does the step. All tables must have one dim.

    Args:
        max_gradient: see `Optimizer`.

    Raises:
        ValueError: max_gradient is negative or not finite.
    """

    name: ClassVar[str] = "none"
    hyperparameter_names: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[dict[str, RowUpdate]] = {"none": RowUpdate(load_no_state, update_none, reference_none)}
