"""Optimizers: what a user passes, how a kernel updates a row, and the same formula in PyTorch; a file for each family.

A new optimizer is one class: its hyperparameters, its states, and for each of its variants a `RowUpdate`, which is two
device functions and the reference. A variant is what is compiled on its own, such as one kind of weight decay; numbers
that may change from step to step are hyperparameters, which kernels read from the device. The device functions get a
tile of rows:

    load_state(states, state_row, weight_offset, live, DIM, BLOCK_D) -> state
        issued before the gradients are summed, so that its latency is hidden
    update(weight, grad, state, states, state_row, weight_offset, live, stamp_ptr, DIM, BLOCK_D) -> new weight
        stores the new state itself

with weight and grad [R, BLOCK_D] fp32 (grad is the exact sum over the run; both are 0 in masked columns), states an
`OptimizerStates`, and [R] each: state_row, where row-wise states have the row's element; weight_offset, where the
weights and all states with one element per weight have its first; live.
"""

from __future__ import annotations

from fbtriton.optim.adagrad import Adagrad, RowwiseAdagrad
from fbtriton.optim.adam import Adam, PartialRowwiseAdam
from fbtriton.optim.base import (
    Optimizer,
    OptimizerStates,
    RowUpdate,
    StateSpec,
    check_range,
    make_stamp,
    read_stamp,
    stamp_size,
)
from fbtriton.optim.lamb import Lamb, PartialRowwiseLamb
from fbtriton.optim.none import NoOptimizer
from fbtriton.optim.sgd import SGD, LarsSGD

__all__ = [
    "KINDS",
    "OPTIMIZERS",
    "STATES",
    "SGD",
    "Adagrad",
    "Adam",
    "Lamb",
    "LarsSGD",
    "NoOptimizer",
    "Optimizer",
    "OptimizerStates",
    "PartialRowwiseAdam",
    "PartialRowwiseLamb",
    "RowUpdate",
    "RowwiseAdagrad",
    "StateSpec",
    "check_range",
    "make_stamp",
    "read_stamp",
    "stamp_size",
]

KINDS: tuple[type[Optimizer], ...] = (
    SGD, LarsSGD, Adagrad, RowwiseAdagrad, Adam, PartialRowwiseAdam, Lamb, PartialRowwiseLamb, NoOptimizer,
)  # fmt: skip
# By `Optimizer.variant`, which is how an `OperatorSpec` names what it is trained by.
OPTIMIZERS: dict[str, RowUpdate] = {name: update for kind in KINDS for name, update in kind.variants.items()}
STATES: dict[str, tuple[StateSpec, ...]] = {name: kind.states for kind in KINDS for name in kind.variants}
