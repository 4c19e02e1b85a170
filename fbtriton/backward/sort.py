"""One stable sort of (key, value) pairs, by the best backend that the device has.

    keys     7 2 7 0 2       bits 3: no key has more
    values   a b c d e
    sorted   0 2 2 7 7
             d b e a c       equal keys keep their order

cuda-cccl's radix sort goes through the bits in use only and carries 4-byte values; PyTorch's goes through all of the
key with 8-byte positions, by which the values must then be gathered. On one H200, with 4-byte keys and values (us):

    pairs, bits          cuda.compute    torch.sort without the gather
    0.33M, 22                      44              75
    4.9M,  24                     179             298
    52M,   9                      832            2052
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fbtriton._triton import current_stream
from fbtriton.config import select_sort

Sort = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Backend:
    """What sorts on a device, and why."""

    name: str
    reason: str
    sort: Sort


class Memory:
    """A tensor's memory for cuda.compute, which keeps what it was given last: this keeps no tensor alive."""

    __slots__ = ("nbytes", "pointer")

    def __init__(self, tensor: Tensor) -> None:
        self.pointer, self.nbytes = tensor.data_ptr(), tensor.nbytes

    def data_ptr(self) -> int:
        return self.pointer


class Stream:
    """A CUDA stream in the form that cuda.compute asks for."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class RadixSort:
    """cuda.compute's radix sort for one device and pair of dtypes.

    Temporary storage comes from PyTorch's allocator at each call, on the current stream; the launch state that
    cuda.compute writes into is kept per thread.

    Args:
        compute: the module `cuda.compute`.
    """

    def __init__(self, compute: Any, device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype) -> None:
        self.compute = compute
        self.device = device
        self.dtypes = key_dtype, value_dtype
        self.of_thread = threading.local()
        self.storage_bytes: dict[tuple[int, int], int] = {}
        self.sorter()  # builds it, so that what fails fails here

    def sorter(self) -> Any:
        """This thread's sorter; cuda.compute compiles once for all threads."""
        if not hasattr(self.of_thread, "sorter"):
            # Real tensors, not its ProxyArray: values without memory make it build a sort of the keys alone.
            keys, values = (torch.empty(1, dtype=dtype, device=self.device) for dtype in self.dtypes)
            with torch.cuda.device(self.device):
                self.of_thread.sorter = self.compute.make_radix_sort(
                    d_in_keys=keys,
                    d_out_keys=keys,
                    d_in_values=values,
                    d_out_values=values,
                    order=self.compute.SortOrder.ASCENDING,
                )
        return self.of_thread.sorter

    def __call__(self, keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        sorter = self.sorter()
        sorted_keys, sorted_values = torch.empty_like(keys), torch.empty_like(values)
        arguments = {
            "d_in_keys": Memory(keys),
            "d_out_keys": Memory(sorted_keys),
            "d_in_values": Memory(values),
            "d_out_values": Memory(sorted_values),
            "begin_bit": 0,
            "end_bit": bits,
            "stream": Stream(current_stream(keys.device.index)),
        }
        size = round_up(keys.numel())
        if (size, bits) not in self.storage_bytes:
            self.storage_bytes[size, bits] = sorter(temp_storage=None, num_items=size, **arguments)
        storage = keys.new_empty(self.storage_bytes[size, bits], dtype=torch.uint8)
        sorter(temp_storage=Memory(storage), num_items=keys.numel(), **arguments)
        return sorted_keys, sorted_values


def round_up(size: int) -> int:
    """Keep the four highest bits: storage for more pairs is enough for fewer, and is asked for seldom."""
    unit = 1 << max(0, size.bit_length() - 4)
    return -(-size // unit) * unit


def torch_sort(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    keys, order = torch.sort(keys, stable=True)
    return keys, values[order]


@functools.cache
def choose_backend(device: torch.device, key_dtype: torch.dtype, value_dtype: torch.dtype, name: str | None) -> Backend:
    """The backend of a device; name forces one. The first call for a GPU compiles, which takes seconds."""
    if name == "torch":
        return Backend("torch.sort", "forced", torch_sort)
    if device.type != "cuda" or torch.version.hip is not None:
        return Backend("torch.sort", "cuda.compute runs on NVIDIA GPUs only", torch_sort)
    try:
        import cuda.compute

        radix_sort = RadixSort(cuda.compute, device, key_dtype, value_dtype)
    except Exception as error:  # a broken optional package raises anything: missing libraries, drivers, headers
        if name is not None:
            raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return Backend("torch.sort", f"cuda.compute (package cuda-cccl) cannot be used: {problem}", torch_sort)
    return Backend("cuda.compute radix sort", "package cuda-cccl found and compiled", radix_sort)


def describe_backend(device: torch.device) -> str:
    """For `python -m fbtriton info`."""
    backend = choose_backend(device, torch.int32, torch.int32, select_sort())
    return f"{backend.name} ({backend.reason})"


def sort_pairs(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Sort by key, stably. Does not synchronise; captures into a CUDA graph once it has run.

    Args:
        keys: [N] int32 or int64, not negative.
        values: [N] int32 or int64.
        bits: every key is below 2**bits.

    Returns:
        Sorted keys and their values, in new tensors.
    """
    return choose_backend(keys.device, keys.dtype, values.dtype, select_sort()).sort(keys, values, bits)
