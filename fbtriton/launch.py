"""Launch a kernel at half of Triton's host cost: through the handle of an equal launch made before.

Triton looks at every argument of a launch, among others at tuples and constants one by one. `launch` looks only at what
can make Triton compile another variant, in the same way:

    tensor                       dtype, and whether its memory starts at a multiple of 16 bytes
    integer                      whether it fits 32 bits; and whether it is 1 or a multiple of 16, unless the kernel
                                 declares do_not_specialize
    constant, None, option       its value

Where such a launch was made before on this device, the compiled kernel that it returned is called.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fbtriton._triton import JITFunction
from fbtriton.config import kernels_on_cpu

ALIGNMENT = 16
OPTIONS = ("num_warps", "maxnreg", "debug")
_compiled: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Name, whether it is a constant, and whether an integer is specialised, of each parameter of a kernel."""
    return tuple((p.name, p.is_constexpr, not p.do_not_specialize) for p in kernel.params)


def _describe(key: list[Any], value: Any, constant: bool, specialised: bool) -> None:
    """Append to the key what of a value selects a variant."""
    if isinstance(value, Tensor):
        key += (value.dtype, value.data_ptr() % ALIGNMENT == 0)
    elif constant or value is None:
        key.append(id(value) if isinstance(value, JITFunction) else value)
    elif isinstance(value, tuple):
        key.append(type(value))
        for item in value:
            _describe(key, item, False, True)
    elif isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        key.append((wide, value == 1, value % 16 == 0) if specialised else wide)
    else:
        key.append(type(value))


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """`kernel[grid](**arguments)` on the current device, which is that of the tensors.

    Args:
        kernel: a `@triton.jit` function whose global constants do not change.
        arguments: all of the kernel's, and options of Triton, such as num_warps.
    """
    if kernels_on_cpu.get():
        kernel[grid](**arguments)
        return
    key: list[Any] = [id(kernel), torch.cuda.current_device()]
    for option in OPTIONS:
        key.append(arguments.get(option))
    values = []
    for name, constant, specialised in _parameters(kernel):
        value = arguments[name]
        values.append(value)
        _describe(key, value, constant, specialised)
    variant = tuple(key)
    handle = _compiled.get(variant)
    if handle is None:
        _compiled[variant] = kernel[grid](**arguments)
    else:
        handle[(*grid, 1, 1)[:3]](*values)
