"""The sort of the backward: PyTorch's everywhere, cuda.compute's on a GPU, and what is said about the choice.

Without a GPU a stand-in for cuda.compute sorts CPU memory. It shows that buffers, bits and storage are handed over as
its interface has them; that the package itself sorts is seen on a GPU only.
"""

import contextlib
import ctypes
import enum
import sys
import types

import numpy as np
import pytest
import torch

from fbtriton.backward import sort
from fbtriton.backward.sort import Backend, RadixSort, choose_backend, describe_backend, round_up, sort_pairs
from fbtriton.config import force_config

DTYPES = [torch.int32, torch.int64]


def make_pairs(size, bits, key_dtype, value_dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 2**bits, (size,), generator=generator)
    return keys.to(device, key_dtype), torch.arange(size, dtype=value_dtype, device=device)


def check(sorted_keys, sorted_values, keys, values):
    """Against PyTorch's stable sort; values are positions, so equal keys out of order would show."""
    expected, order = torch.sort(keys, stable=True)
    assert torch.equal(sorted_keys, expected)
    assert torch.equal(sorted_values, values[order])


@pytest.mark.parametrize("key_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size, bits", [(1, 1), (5, 3), (1000, 4), (1000, 31)])
def test_torch_sort(size, bits, key_dtype, value_dtype):
    keys, values = make_pairs(size, bits, key_dtype, value_dtype)
    with force_config(sort="torch"):
        check(*sort_pairs(keys.clone(), values.clone(), bits), keys, values)


def test_round_up():
    for size in [*range(1, 70), 1000, 8832, 2**31 - 2**20]:
        assert size <= round_up(size) <= size * 9 / 8 + 1
    assert len({round_up(size) for size in range(1, 2**16)}) < 200


class StandIn(types.ModuleType):
    """The part of cuda.compute's interface that is used, over CPU memory."""

    class SortOrder(enum.Enum):
        ASCENDING = 0
        DESCENDING = 1

    def __init__(self):
        super().__init__("cuda.compute")
        self.calls = []

    def make_radix_sort(self, *, d_in_keys, d_out_keys, d_in_values, d_out_values, order):
        assert order is self.SortOrder.ASCENDING
        assert all(array.data_ptr() for array in (d_in_keys, d_out_keys, d_in_values, d_out_values))
        dtypes = [np.dtype(str(array.dtype).removeprefix("torch.")) for array in (d_in_keys, d_in_values)]
        assert (d_in_keys.dtype, d_in_values.dtype) == (d_out_keys.dtype, d_out_values.dtype)
        return lambda **arguments: self.sort(dtypes, **arguments)

    def sort(
        self, dtypes, *, temp_storage, d_in_keys, d_out_keys, d_in_values, d_out_values, num_items, begin_bit, end_bit,
        stream,
    ):  # fmt: skip
        assert stream.__cuda_stream__() == (0, 7)
        self.calls.append((temp_storage is None, num_items, end_bit))
        if temp_storage is None:
            return 3 * num_items
        assert temp_storage.nbytes >= 3 * num_items and begin_bit == 0

        def array(memory, dtype):
            assert memory.nbytes == num_items * dtype.itemsize
            return np.frombuffer((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()), dtype)

        keys, new_keys = (array(memory, dtypes[0]) for memory in (d_in_keys, d_out_keys))
        values, new_values = (array(memory, dtypes[1]) for memory in (d_in_values, d_out_values))
        order = np.argsort(keys & keys.dtype.type(2**end_bit - 1), kind="stable")
        new_keys[:], new_values[:] = keys[order], values[order]


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(sort, "current_stream", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return StandIn()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the package itself is tested")
@pytest.mark.parametrize("key_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_dtype", DTYPES, ids=str)
def test_radix_sort_hands_over_its_buffers(key_dtype, value_dtype, stand_in):
    radix_sort = RadixSort(stand_in, torch.device("cpu"), key_dtype, value_dtype)
    for size in (1, 33, 34):
        keys, values = make_pairs(size, 5, key_dtype, value_dtype)
        check(*radix_sort(keys.clone(), values.clone(), 5), keys, values)
    asked = [size for is_question, size, _ in stand_in.calls if is_question]
    assert asked == [1, 36]  # 33 and 34 share one answer


def test_a_broken_package_falls_back_and_says_why(monkeypatch):
    broken = StandIn()
    broken.make_radix_sort = lambda **arguments: (_ for _ in ()).throw(RuntimeError("no libnvrtc\nhere"))
    parent = types.ModuleType("cuda")
    parent.compute = broken
    monkeypatch.setitem(sys.modules, "cuda", parent)
    monkeypatch.setitem(sys.modules, "cuda.compute", broken)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: None)  # there may be no GPU
    choose = choose_backend.__wrapped__
    chosen = choose(torch.device("cuda", 0), torch.int32, torch.int32, None)
    assert chosen.sort is sort.torch_sort
    assert chosen.reason == "cuda.compute (package cuda-cccl) cannot be used: RuntimeError: no libnvrtc here"
    with pytest.raises(RuntimeError, match="no libnvrtc"):
        choose(torch.device("cuda", 0), torch.int32, torch.int32, "cuda.compute")


def test_description():
    assert describe_backend(torch.device("cpu")) == "torch.sort (cuda.compute runs on NVIDIA GPUs only)"
    with force_config(sort="torch"):
        assert describe_backend(torch.device("cpu")) == "torch.sort (forced)"


@pytest.fixture
def radix():
    pytest.importorskip("cuda.compute")
    with force_config(sort="cuda.compute"):
        yield


def chosen_sort(key_dtype=torch.int32, value_dtype=torch.int32) -> Backend:
    return choose_backend(torch.device("cuda", 0), key_dtype, value_dtype, "cuda.compute")


@pytest.mark.gpu
@pytest.mark.parametrize("key_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_dtype", DTYPES, ids=str)
def test_radix_sort_on_a_gpu(key_dtype, value_dtype, radix):
    assert isinstance(chosen_sort(key_dtype, value_dtype).sort, RadixSort)
    for size in (1, 2, 31, 1000, 8832, 8833, 17_665, 100_003, 1_000_000):
        for bits in (1, 7, 8, 9, 17, 24, 31):
            keys, values = make_pairs(size, bits, key_dtype, value_dtype, "cuda", seed=bits)
            check(*sort_pairs(keys.clone(), values.clone(), bits), keys, values)


@pytest.mark.gpu
def test_64_bit_keys_on_a_gpu(radix):
    keys, values = make_pairs(100_000, 40, torch.int64, torch.int32, "cuda")
    check(*sort_pairs(keys.clone(), values.clone(), 40), keys, values)


@pytest.mark.gpu
def test_radix_sort_in_a_graph(radix):
    keys, values = make_pairs(50_000, 20, torch.int32, torch.int64, "cuda")
    sort_pairs(keys.clone(), values.clone(), 20)  # compiles
    given_keys, given_values = torch.empty_like(keys), torch.empty_like(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sorted_keys, sorted_values = sort_pairs(given_keys.clone(), given_values.clone(), 20)
    for seed in range(3):
        keys, values = make_pairs(50_000, 20, torch.int32, torch.int64, "cuda", seed)
        given_keys.copy_(keys)
        given_values.copy_(values)
        graph.replay()
        check(sorted_keys, sorted_values, keys, values)


@pytest.mark.gpu
def test_radix_sort_on_two_streams(radix):
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    pairs = [make_pairs(300_000, 22, torch.int32, torch.int32, "cuda", seed) for seed in range(8)]
    torch.cuda.synchronize()
    results = []
    for number, (keys, values) in enumerate(pairs):
        with torch.cuda.stream(streams[number % 2]):
            results.append(sort_pairs(keys.clone(), values.clone(), 22))
    torch.cuda.synchronize()
    for result, pair in zip(results, pairs, strict=True):
        check(*result, *pair)


@pytest.mark.gpu
def test_radix_sort_does_not_synchronise(radix):
    keys, values = make_pairs(50_000, 20, torch.int32, torch.int32, "cuda")
    sort_pairs(keys.clone(), values.clone(), 20)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sort_pairs(keys, values, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
