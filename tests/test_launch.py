"""A launch runs an earlier compilation exactly where Triton would not compile another variant.

Left out: what that does on a GPU, which every kernel's test on a GPU covers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fbtriton import launch as launching
from fbtriton.config import LongRunConfig, Target, backend, kernels_on_cpu
from fbtriton.launch import Constants, bucket_launches


@dataclass
class Parameter:
    name: str
    is_constexpr: bool = False
    do_not_specialize: bool = False


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


class Recorder:
    """Stands for a kernel and what it compiles to: what was compiled, and what an earlier compilation was run with."""

    function, packed_metadata = "function", "metadata"

    params = (Parameter("x"), Parameter("pair"), Parameter("n", do_not_specialize=True), Parameter("stride"),
              Parameter("BLOCK", is_constexpr=True))  # fmt: skip

    def __init__(self):
        self.compiled, self.handled = [], []

    def __getitem__(self, grid):
        def first_launch(**arguments):
            self.compiled.append(arguments)
            return self

        return first_launch

    def run(self, *arguments):
        self.handled.append(arguments)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launching, "current_stream", lambda device: 77)
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
    addresses = values["x"].data_ptr(), (values["pair"].first.data_ptr(), None)
    given = (*addresses, values["n"], values["stride"], values["BLOCK"])
    assert kernel.handled == [(3, 1, 1, 77, "function", "metadata", None, None, None, *given)]


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


def test_planned_constants(kernel):
    """The same object is the same variant, an equal one is not; a plan is not looked into again."""
    arguments = {name: value for name, value in SAME.items() if name not in ("BLOCK", "num_warps")}
    plan = launching.Constants(BLOCK=4, num_warps=1)
    for _ in range(2):
        launching.launch(kernel, (3,), plan, **arguments)
    assert kernel.compiled == [SAME] and len(kernel.handled) == 1
    assert kernel.handled[0][-1] == 4
    launching.launch(kernel, (3,), launching.Constants(BLOCK=4, num_warps=1), **arguments)
    launching.launch(kernel, (3,), plan, **arguments | {"stride": 1})
    assert len(kernel.compiled) == 3


def test_a_profiler_hears_of_every_launch(kernel, monkeypatch):
    monkeypatch.setattr(launching, "has_launch_hooks", lambda: True)
    for _ in range(2):
        launching.launch(kernel, (3,), **SAME)
    assert len(kernel.compiled) == 2 and not kernel.handled


def test_hooks_of_triton_are_seen():
    knobs = pytest.importorskip("triton").knobs
    assert not launching.has_launch_hooks()
    hook = print
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert launching.has_launch_hooks()
        chain.remove(hook)
    assert not launching.has_launch_hooks()


def test_constants_come_last(kernel):
    """So that the values of a launch are addresses, then constants."""
    kernel.params = (Parameter("BLOCK", is_constexpr=True), Parameter("x"))
    with pytest.raises(AssertionError, match="constants come last"):
        launching.launch(kernel, (3,), x=ALIGNED, BLOCK=4)


def test_other_device(kernel, monkeypatch):
    launching.launch(kernel, (3,), **SAME)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launching.launch(kernel, (3,), **SAME)
    assert len(kernel.compiled) == 2


def test_programs_of_buckets():
    """A share of the work each, but not fewer programs than start at once, nor more than the configuration has."""
    target = Target("made", 10)
    configs = [LongRunConfig(programs_per_multiprocessor=64)] * 2 + [LongRunConfig(num_warps=4)]
    pair, single = bucket_launches(target, configs, lambda group: Constants(group=group), share=4)
    assert [part.first_bucket for part in (pair, single)] == [0, 2]
    assert [pair.constants["group"], single.constants["group"]] == [slice(0, 2), slice(2, 3)]
    # two buckets: 8 to 32 programs of each for each of 10 multiprocessors; one: 16 to 128
    assert [pair.grid(work) for work in (0, 7, 100, 401, 10_000)] == [(1, 2), (7, 2), (80, 2), (101, 2), (320, 2)]
    assert [single.grid(work) for work in (100, 1000, 2000, 10_000)] == [(100, 1), (250, 1), (500, 1), (1280, 1)]
