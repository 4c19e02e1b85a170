"""Compile without a GPU: every kernel launch becomes a compilation for a chosen target.

    with compile_only("cuda", 90) as kernels:
        module(indices, offsets).sum().backward()       # CPU tensors; nothing is launched
    for kernel in kernels:
        print(kernel.name, resources(kernel), load_widths(kernel))

The launchers run as they are, so what is compiled is what a GPU would get for these tensors.
"""

from __future__ import annotations

import collections
import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fbtriton import config

WARP_SIZES = {"cuda": 32, "hip": 64}


@dataclass(frozen=True)
class Resources:
    """What one variant occupies, from `cuobjdump` and the SASS."""

    registers: int
    spills: int  # loads and stores of local memory in the machine code
    loop_spills: int  # those in innermost loops
    shared_bytes: int


def _offline_driver(backend: str, arch: int | str) -> Any:
    """The little of a Triton driver that a compilation asks for. Each target is a device of its own, because
    Triton keeps compiled kernels by device."""
    from triton.backends.compiler import GPUTarget

    driver = mock.Mock(spec=["get_current_device", "get_current_stream", "get_current_target"])
    driver.get_current_device.return_value = f"{backend}:{arch}"
    driver.get_current_stream.return_value = 0
    driver.get_current_target.return_value = GPUTarget(backend, arch, WARP_SIZES[backend])
    return driver


@contextlib.contextmanager
def compile_only(backend: str = "cuda", arch: int | str = 90) -> Iterator[list[Any]]:
    """Collects the compiled kernels (`triton.compiler.CompiledKernel`), each variant once, in launch order.

    Needs a process in which TRITON_INTERPRET is not set. Results of the operator are undefined inside.

    Args:
        backend: "cuda" or "hip".
        arch: compute capability (90, 100) or architecture name ("gfx942").
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels: dict[int, Any] = {}
    launch = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.setdefault(id(kernel), kernel)
        return kernel

    collected: list[Any] = []
    before = driver._active
    driver.set_active(_offline_driver(backend, arch))
    tokens = config.kernels_on_cpu.set(True), config.backend.set(backend)
    try:
        with mock.patch.object(JITFunction, "run", compile_instead):
            yield collected
    finally:
        config.kernels_on_cpu.reset(tokens[0])
        config.backend.reset(tokens[1])
        driver._active = before
        collected.extend(kernels.values())


def resources(kernel: Any) -> Resources:
    """Registers, spills and shared memory of a kernel compiled for CUDA."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    sass = kernel.asm["sass"] if stack else ""
    return Resources(registers, _spills(sass), sum(map(_spills, innermost_loops(sass))), kernel.metadata.shared)


def _spills(sass: str) -> int:
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))


def innermost_loops(sass: str) -> list[str]:
    """The machine code of loops that hold no other loop: from a label to a branch back to it."""
    lines = sass.splitlines()
    labels = {line.strip().removesuffix(":"): number for number, line in enumerate(lines) if line.strip().endswith(":")}
    loops = []
    for end, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*?(\w+)\s*;", line)
        if target and labels.get(target[1], end + 1) <= end:
            loops.append((labels[target[1]], end))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return ["\n".join(lines[begin : end + 1]) for begin, end in inner]


def load_widths(kernel: Any) -> collections.Counter[str]:
    """How often each kind of global load stands in the SASS: "LDG.E.128" is 16 bytes a lane, "LDG.E.U16" two."""
    loads = re.findall(r"\bLDG\.E[.A-Z0-9]*", kernel.asm["sass"])
    kept = ("128", "64", "U16", "U8", "S8", "S16")
    names = (".".join(["LDG.E", *(part for part in load.split(".") if part in kept)]) for load in loads)
    return collections.Counter(names)


def arithmetic(kernel: Any) -> collections.Counter[str]:
    """How often each fp32 addition, subtraction, multiplication and fused multiply-add stands in the PTX."""
    return collections.Counter(re.findall(r"\b(add|sub|mul|fma)\.(?:rn\.)?f32\b", kernel.asm["ptx"]))
