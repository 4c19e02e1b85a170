"""Launch a kernel at less cost for the host than Triton's own launch: as an equal one made before.

Triton looks at every argument of a launch, among others at tuples and constants one by one, and asks the driver about
every pointer. `launch` looks only at what can make Triton compile another variant, in the same way:

    tensor                       dtype, and whether its memory starts at a multiple of 16 bytes
    integer                      whether it fits 32 bits; and whether it is 1 or a multiple of 16, unless the kernel
                                 declares do_not_specialize
    constant, None, option       its value

Where such a launch was made before on this device, the compiled kernel that it returned is run, with addresses in the
place of tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fbtriton._triton import current_stream, has_launch_hooks
from fbtriton.config import Target, backend, kernels_on_cpu

ALIGNMENT = 16


class Constants(dict[str, Any]):
    """Constants of one kernel, and options, that are planned once and launched with often. Equal only to itself, so
    that it is found without a look at what it holds."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


class _Variant(NamedTuple):
    """A compiled kernel, as `triton.JITFunction.run` calls it, and the constants that come last in its arguments."""

    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_variants: dict[tuple[Any, ...], _Variant] = {}


def _taker(names: list[str]) -> Any:
    """Takes the arguments of these names out of all, as a tuple."""
    if len(names) == 1:
        return lambda arguments: (arguments[names[0]],)
    return itemgetter(*names) if names else lambda arguments: ()


@functools.cache
def _parameters(kernel: Any) -> tuple[Any, tuple[bool, ...], Any]:
    """What takes the arguments that are no constants; whether an integer among them is specialised; and what takes the
    constants, which come last."""
    constant = [p.is_constexpr for p in kernel.params]
    assert constant == sorted(constant), "constants come last"
    dynamic = [p for p in kernel.params if not p.is_constexpr]
    specialised = tuple(not p.do_not_specialize for p in dynamic)
    return _taker([p.name for p in dynamic]), specialised, _taker([p.name for p in kernel.params[len(dynamic) :]])


def _addresses(key: list[Any], values: Iterable[Any], specialised: Iterable[bool]) -> list[Any]:
    """What a kernel is given for arguments that are no constants. Appends what selects a variant to the key."""
    given: list[Any] = []
    for value, special in zip(values, specialised, strict=False):
        if isinstance(value, Tensor):
            address = value.data_ptr()
            key.append((value.dtype,) if address % ALIGNMENT else value.dtype)
            given.append(address)
        elif value is None:
            key.append(None)
            given.append(None)
        elif isinstance(value, tuple):
            key.append(len(value))
            given.append(tuple(_addresses(key, value, itertools.repeat(True))))
        elif isinstance(value, int):
            wide = not -(2**31) <= value < 2**31
            key.append((wide, value == 1, value % 16 == 0) if special else wide)
            given.append(value)
        else:
            raise TypeError(f"an argument must be a tensor, a tuple of them, an integer or None, got {value!r}")
    return given


OPTIONS = ("num_warps", "maxnreg", "debug")


def launch(kernel: Any, grid: tuple[int, ...], constants: Constants | None = None, **arguments: Any) -> None:
    """`kernel[grid](**arguments, **constants)` on the current device, which is that of the tensors.

    Args:
        kernel: a `@triton.jit` function whose global constants do not change.
        constants: the kernel's constants and Triton's options, if they are planned; else they are among arguments.
        arguments: everything else.
    """
    if kernels_on_cpu.get() or backend.get() != "cuda":  # on AMD the size of a tensor's memory selects a variant too
        kernel[grid](**arguments | dict(constants or ()))
        return
    device = torch.cuda.current_device()
    take_dynamic, specialised, take_constants = _parameters(kernel)
    key: list[Any] = [device, constants]
    if constants is None:
        key += (id(kernel), *map(arguments.get, OPTIONS), take_constants(arguments))
    values = _addresses(key, take_dynamic(arguments), specialised)
    variant = tuple(key)
    compiled = _variants.get(variant)
    if compiled is None or has_launch_hooks():
        everything = arguments | dict(constants or ())
        unknown = set(everything) - {p.name for p in kernel.params} - set(OPTIONS)
        assert not unknown, f"options that are not part of the key: {unknown}"
        handle = kernel[grid](**everything)
        _variants[variant] = _Variant(handle.run, handle.function, handle.packed_metadata, take_constants(everything))
        return
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(
        x, y, z, current_stream(device), compiled.function, compiled.metadata, None, None, None,
        *values, *compiled.constants,
    )  # fmt: skip


def cdiv(count: int, size: int) -> int:
    """How many blocks of a size hold the count. Triton's own costs the host two microseconds."""
    return -(-count // size)


def launch_options(num_warps: int, registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch. AMD's compiler takes no limit of registers."""
    options: dict[str, Any] = {"num_warps": num_warps}
    if registers is not None and backend.get() == "cuda":
        options["maxnreg"] = registers
    return options


def fixed_grid(target: Target, programs_per_multiprocessor: int, upper_bound: int) -> tuple[int]:
    """Programs that loop over a count known on the device only; never more than could have work."""
    return (max(1, min(target.multiprocessors * programs_per_multiprocessor, upper_bound)),)


LEAST_PROGRAMS = 8  # for each multiprocessor and bucket
FEW_PROGRAMS = 16  # for each multiprocessor; as many start at once wherever they fit


class BucketLaunch(NamedTuple):
    """A launch for some neighbouring buckets, as far as it is the same in every step."""

    first_bucket: int
    num_buckets: int
    few_programs: int  # for each bucket
    most_programs: int
    share: int
    constants: Constants

    def grid(self, upper_bound: int) -> tuple[int, int]:
        """`fixed_grid` for each of the buckets, which share the launch, and so the multiprocessors. Where there may be
        enough to do, a program gets `share` of it: most of the upper bound may be empty, and empty programs take time.
        """
        programs = max(self.few_programs, cdiv(upper_bound, self.share))
        return max(1, min(self.most_programs, programs, upper_bound)), self.num_buckets


def bucket_launches(
    target: Target, configs: Sequence[Any], constants_of: Callable[[slice], Constants], share: int = 1
) -> tuple[BucketLaunch, ...]:
    """One for neighbours with as many warps and registers. configs: of each bucket; the first of a launch says how many
    programs there are. constants_of: a slice of the buckets."""
    launches, first = [], 0
    for _, group in itertools.groupby(configs, key=lambda config: (config.num_warps, config.registers)):
        of_group = list(group)
        size = len(of_group)
        few, most = (
            max(LEAST_PROGRAMS, of_multiprocessor // size) * target.multiprocessors
            for of_multiprocessor in (FEW_PROGRAMS, of_group[0].programs_per_multiprocessor)
        )
        launches.append(BucketLaunch(first, size, few, most, share, constants_of(slice(first, first + size))))
        first += size
    return tuple(launches)
