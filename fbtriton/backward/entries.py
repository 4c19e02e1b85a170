"""What the sort carries for each entry, so that nothing is looked up by random access afterwards.

    all gradients count the same     payload = offset / unit, 32 bits, or 64 where 32 are too few
    with factors                     payload = factor's fp32 bits << 32 | offset / unit
    with factors, offset too wide    payload = the entry's number; offsets and scales by entry

where offset is the first element of the bag's gradient and every offset is a multiple of unit. Example, unit 4:
offset 40 with factor 0.5 is 0x3F000000_0000000A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.layout import Entries


@triton.jit
def store_entry(entries, position, grad_offset, scale, SCALED: tl.constexpr, UNIT: tl.constexpr):
    """position, grad_offset (int64), scale (fp32): [K]"""
    if entries.scales is not None:
        tl.store(entries.payload + position, position)
        tl.store(entries.offsets + position, grad_offset)
        tl.store(entries.scales + position, scale)
    else:
        word = grad_offset // UNIT
        if SCALED:
            word |= scale.to(tl.uint32, bitcast=True).to(tl.int64) << 32
        tl.store(entries.payload + position, word.to(entries.payload.dtype.element_ty))


@triton.jit
def load_entry(entries, slot, live, SCALED: tl.constexpr, UNIT: tl.constexpr):
    """slot, live [K] -> offset of the gradient [K] int64, 0 where masked, and its factor [K] fp32"""
    word = tl.load(entries.payload + slot, mask=live, other=0)
    scale = tl.full(slot.shape, 1.0, tl.float32)
    if entries.scales is not None:
        offset = tl.load(entries.offsets + word, mask=live, other=0)
        scale = tl.load(entries.scales + word, mask=live, other=0.0)
    elif SCALED:
        offset = (word & 0xFFFFFFFF) * UNIT
        scale = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif entries.payload.dtype.element_ty == tl.int32:
        offset = word.to(tl.uint32, bitcast=True).to(tl.int64) * UNIT
    else:
        offset = word * UNIT
    return offset, scale


@dataclass(frozen=True)
class EntryForm:
    """What kernels must know to read entries."""

    scaled: bool  # entries have factors
    unit: int  # a power of two

    def empty(self, num_entries: int, last_offset: int, offset_bits: int, device: torch.device) -> Entries:
        """Room for entries, in the narrowest form in which offsets up to last_offset fit into offset_bits."""

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.empty(num_entries, dtype=dtype, device=device)

        narrow = last_offset // self.unit < 1 << offset_bits
        if not self.scaled:
            return Entries(empty(torch.int32 if narrow else torch.int64), None, None)
        if narrow:
            return Entries(empty(torch.int64), None, None)
        return Entries(empty(torch.int32), empty(torch.int64), empty(torch.float32))
