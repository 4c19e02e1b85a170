"""Many small tensors from one allocation of each dtype."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

UNIT_BYTES = 16  # a tensor that starts at a multiple of it is loaded in the widest loads


def carve(device: torch.device, dtype: torch.dtype, **sizes: int) -> dict[str, Tensor]:
    """Uninitialised tensors of one dimension.

        carve(device, torch.int32, a=5, b=3)     a owns the elements 0 to 4, b the elements 8 to 10

    Returns:
        The tensors by name. Each starts at a multiple of 16 bytes.
    """
    unit = UNIT_BYTES // dtype.itemsize
    padded = [-(-size // unit) * unit for size in sizes.values()]
    memory = torch.empty(sum(padded), dtype=dtype, device=device)
    starts = accumulate(padded, initial=0)
    return {name: memory[start : start + size] for (name, size), start in zip(sizes.items(), starts, strict=False)}
