"""A launch goes through a handle exactly where Triton would not compile another variant.

Left out: what a handle does on a GPU, which every kernel's test on a GPU covers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fbtriton import launch as launching
from fbtriton.config import backend, kernels_on_cpu


@dataclass
class Parameter:
    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


class Recorder:
    """Stands for a kernel: what was compiled, and what went through a handle."""

    params = (Parameter("x"), Parameter("pair"), Parameter("n", do_not_specialize=True), Parameter("stride"),
              Parameter("BLOCK", is_constexpr=True))  # fmt: skip

    def __init__(self):
        self.compiled, self.handled = [], []

    def __getitem__(self, grid):
        def first_launch(**arguments):
            self.compiled.append(arguments)
            return {(*grid, 1, 1)[:3]: lambda *values: self.handled.append(values)}

        return first_launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tokens = kernels_on_cpu.set(False), backend.set("cuda")
    yield Recorder()
    kernels_on_cpu.reset(tokens[0])
    backend.reset(tokens[1])


ALIGNED = torch.zeros(64)
SAME = {"x": ALIGNED, "pair": Pair(ALIGNED, None), "n": 7, "stride": 8, "BLOCK": 4, "num_warps": 1}


@pytest.mark.parametrize(
    "change",
    [{"n": 1}, {"n": 16}, {"stride": 9}, {"x": torch.ones(32)}, {"pair": Pair(torch.ones(16), None)}],
    ids=str,
)
def test_same_variant(kernel, change):
    launching.launch(kernel, (3,), **SAME)
    launching.launch(kernel, (3,), **SAME | change)
    assert len(kernel.compiled) == len(kernel.handled) == 1
    values = SAME | change
    for value, name in zip(kernel.handled[0], ("x", "pair", "n", "stride", "BLOCK"), strict=True):
        assert value is values[name]


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2**31}, {"stride": 1}, {"stride": 32}, {"stride": 2**40}, {"BLOCK": 8}, {"num_warps": 2}, {"maxnreg": 64},
        {"x": ALIGNED[1:]}, {"x": ALIGNED.half()}, {"x": None}, {"pair": Pair(ALIGNED, ALIGNED)},
        {"pair": Pair(ALIGNED[1:], None)},
    ],
    ids=str,
)  # fmt: skip
def test_other_variant(kernel, change):
    launching.launch(kernel, (3,), **SAME)
    launching.launch(kernel, (3,), **SAME | change)
    assert len(kernel.compiled) == 2 and not kernel.handled


def test_other_device(kernel, monkeypatch):
    launching.launch(kernel, (3,), **SAME)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launching.launch(kernel, (3,), **SAME)
    assert len(kernel.compiled) == 2
