"""Launch a kernel at less cost for the host than Triton's own launch: through the handle of an equal one made before.

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
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fbtriton._triton import JITFunction
from fbtriton.config import Target, backend, kernels_on_cpu

ALIGNMENT = 16
_compiled: dict[tuple[Any, ...], Any] = {}


@functools.cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Name, whether it is a constant, and whether an integer is specialised, of each parameter of a kernel."""
    return tuple((p.name, p.is_constexpr, not p.do_not_specialize) for p in kernel.params)


def _describe(key: list[Any], value: Any, specialised: bool) -> None:
    """Append to the key what of an argument that is not a constant selects a variant."""
    if isinstance(value, Tensor):
        key += (value.dtype, value.data_ptr() % ALIGNMENT == 0)
    elif value is None:
        key.append(None)
    elif isinstance(value, tuple):
        key.append(len(value))
        for item in value:
            _describe(key, item, True)
    elif isinstance(value, int):
        wide = not -(2**31) <= value < 2**31
        key.append((wide, value == 1, value % 16 == 0) if specialised else wide)
    else:
        raise TypeError(f"an argument must be a tensor, a tuple of them, an integer or None, got {value!r}")


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """`kernel[grid](**arguments)` on the current device, which is that of the tensors.

    Args:
        kernel: a `@triton.jit` function whose global constants do not change.
        arguments: all of the kernel's, and of Triton's options num_warps, maxnreg and debug.
    """
    if kernels_on_cpu.get() or backend.get() != "cuda":  # on AMD the size of a tensor's memory selects a variant too
        kernel[grid](**arguments)
        return
    get = arguments.get
    key: list[Any] = [id(kernel), torch.cuda.current_device(), get("num_warps"), get("maxnreg"), get("debug")]
    values = []
    for name, constant, specialised in _parameters(kernel):
        value = arguments[name]
        values.append(value)
        if constant:  # functions by identity: Triton hashes their source
            key.append(id(value) if type(value) is JITFunction else value)
        elif type(value) is Tensor:
            key += (value.dtype, value.data_ptr() % ALIGNMENT == 0)
        else:
            _describe(key, value, specialised)
    variant = tuple(key)
    handle = _compiled.get(variant)
    if handle is None:
        unknown = set(arguments) - {name for name, *_ in _parameters(kernel)} - {"num_warps", "maxnreg", "debug"}
        assert not unknown, f"options that are not part of the key: {unknown}"
        _compiled[variant] = kernel[grid](**arguments)
    else:
        handle[(*grid, 1, 1)[:3]](*values)


def cdiv(count: int, size: int) -> int:
    """How many blocks of a size hold the count. Triton's own costs the host two microseconds."""
    return -(-count // size)


def launch_options(num_warps: int, registers: int | None = None) -> dict[str, int]:
    """Keyword arguments of a launch. AMD's compiler takes no limit of registers."""
    options = {"num_warps": num_warps}
    if registers is not None and backend.get() == "cuda":
        options["maxnreg"] = registers
    return options


def fixed_grid(target: Target, programs_per_multiprocessor: int, upper_bound: int) -> tuple[int]:
    """Programs that loop over a count known on the device only; never more than could have work."""
    return (max(1, min(target.multiprocessors * programs_per_multiprocessor, upper_bound)),)


def bucket_grid(target: Target, config: Any, upper_bound: int, num_buckets: int) -> tuple[int, int]:
    """`fixed_grid` for each of some buckets that share a launch, and so the multiprocessors."""
    programs = max(LEAST_PROGRAMS, config.programs_per_multiprocessor // num_buckets)
    return fixed_grid(target, programs, upper_bound)[0], num_buckets


LEAST_PROGRAMS = 8  # for each multiprocessor and bucket


def launch_groups(configs: Sequence[Any]) -> Iterator[range]:
    """The buckets that can share a launch: neighbours with as many warps and registers."""
    first = 0
    for _, group in itertools.groupby(configs, key=lambda config: (config.num_warps, config.registers)):
        size = len(list(group))
        yield range(first, first + size)
        first += size
