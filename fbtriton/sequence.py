"""Unpooled (sequence) embeddings: every entry is a bag of one id, with a row of the output of its own.

So pooling "none" takes the same kernels as a batch size for each feature. Only the offsets say how many entries each
feature has, and they are on the device, so the placement is made there.

Example, two features of dim 4, two samples, offsets 0 2 3 3 4, five ids of which the last is padding:

    entry_offsets    0 1 2 3 4 4      the bag of padding is empty, so its row of the output is zero
    first_bags       0 3 4            feature 0 has the entries 0 to 2
    bag_features     0 0 0 1 1
    output_offsets   0 4 8 12 16
    bucket_bags      0 1 2 3 4        all features have one dim
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.config import select_entry, uses_kernels
from fbtriton.launch import cdiv, launch
from fbtriton.layout import VbeLayout
from fbtriton.rows import upper_bound
from fbtriton.spec import OperatorSpec


class EntryPlaces(NamedTuple):
    """Entries as bags."""

    offsets: Tensor  # [N + 1], of the dtype of the offsets
    vbe: VbeLayout


@triton.jit(do_not_specialize=["num_features", "num_entries"])
def place_entries_kernel(offsets_ptr, vbe, num_features, num_entries, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Everything of `EntryPlaces` that has an element for each entry."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = entry < num_entries
    end = tl.load(vbe.first_bags + num_features)
    tl.store(offsets_ptr + entry, tl.minimum(entry, end).to(offsets_ptr.dtype.element_ty), mask=entry <= num_entries)
    feature = tl.minimum(upper_bound(vbe.first_bags + 1, num_features, entry), num_features - 1)
    tl.store(vbe.bag_features + entry, feature, mask=live)
    tl.store(vbe.output_offsets + entry, entry * DIM, mask=live)
    tl.store(vbe.bucket_bags + entry, entry.to(tl.int32), mask=live)


def first_entries(indices: Tensor, offsets: Tensor, spec: OperatorSpec) -> Tensor:
    """[F + 1] int64, the first entry of each feature, each kept in [0, N]."""
    num_features = len(spec.feature_tables)
    batch_size = (offsets.numel() - 1) // num_features
    if batch_size == 0:
        return torch.zeros(num_features + 1, dtype=torch.int64, device=offsets.device)
    return offsets[::batch_size].clamp(0, indices.numel()).to(torch.int64)


def place_entries(indices: Tensor, offsets: Tensor, spec: OperatorSpec) -> EntryPlaces:
    """One launch and a small copy, without waiting for the device. Offsets may be anything: what lies where is then
    undefined, but inside the tensors."""
    first_bags, num_entries = first_entries(indices, offsets, spec), indices.numel()
    if not uses_kernels(indices.device):
        return reference_places(first_bags, num_entries, offsets.dtype, spec)
    places = EntryPlaces(
        offsets=offsets.new_empty(num_entries + 1),
        vbe=VbeLayout(
            first_bags=first_bags,
            bag_features=offsets.new_empty(num_entries, dtype=torch.int32),
            output_offsets=offsets.new_empty(num_entries, dtype=torch.int64),
            bucket_bags=offsets.new_empty(num_entries, dtype=torch.int32),
        ),
    )
    block = select_entry().block
    launch(
        place_entries_kernel,
        (cdiv(num_entries + 1, block),),
        offsets_ptr=places.offsets,
        vbe=places.vbe,
        num_features=len(spec.feature_tables),
        num_entries=num_entries,
        DIM=spec.layout.dims[0],
        BLOCK=block,
    )
    return places


def reference_places(first_bags: Tensor, num_entries: int, dtype: torch.dtype, spec: OperatorSpec) -> EntryPlaces:
    """The same by PyTorch."""
    entry = torch.arange(num_entries + 1, device=first_bags.device)
    feature = torch.searchsorted(first_bags[1:].contiguous(), entry[:-1], right=True)
    return EntryPlaces(
        offsets=torch.minimum(entry, first_bags[-1]).to(dtype),
        vbe=VbeLayout(
            first_bags=first_bags,
            bag_features=feature.clamp_max(len(spec.feature_tables) - 1).to(torch.int32),
            output_offsets=entry[:-1] * spec.layout.dims[0],
            bucket_bags=entry[:-1].to(torch.int32),
        ),
    )
