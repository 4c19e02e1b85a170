"""How many samples each feature has: one batch size for all, or one for each feature (VBE).

With a batch size for each feature and rank the output has one dimension, rank by rank, feature by feature, sample by
sample, as FBGEMM's `batch_size_per_feature_per_rank` has it. Bags stay feature-major: feature 0's samples of rank 0,
of rank 1, ..., feature 1's samples of rank 0, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.config import select_entry, uses_kernels
from fbtriton.launch import cdiv, launch
from fbtriton.layout import VbeLayout
from fbtriton.rows import upper_bound
from fbtriton.spec import OperatorSpec


@dataclass(frozen=True)
class BatchShape:
    """The bags of a batch, as far as the host knows them.

    Attributes:
        samples: for each feature its number of samples over all ranks; empty if every entry is a bag.
        output_shape: (B, columns), or (elements,) with a batch size for each feature or without pooling.
        batch_size: B; 0 with a batch size for each feature or without pooling.
        entries: the number of entries if each is a bag (pooling "none"), else None.
    """

    samples: tuple[int, ...]
    output_shape: tuple[int, ...]
    batch_size: int
    entries: int | None = None

    @staticmethod
    def of(offsets: Tensor, batch_sizes: Sequence[int], spec: OperatorSpec) -> BatchShape:
        """From the offsets of the bags: of samples, or without pooling of entries (`fbtriton.sequence`)."""
        if spec.pooled:
            return BatchShape.of_samples(offsets, batch_sizes, spec)
        entries = offsets.numel() - 1
        return BatchShape((), (entries * spec.layout.dims[0],), 0, entries)

    @staticmethod
    def of_samples(offsets: Tensor, batch_sizes: Sequence[int], spec: OperatorSpec) -> BatchShape:
        """From the offsets, or from batch_sizes, [F * ranks] and feature-major, if it is not empty."""
        num_features = len(spec.feature_tables)
        if not batch_sizes:
            batch_size = (offsets.numel() - 1) // num_features
            return BatchShape((batch_size,) * num_features, (batch_size, spec.layout.columns[-1]), batch_size)
        ranks = len(batch_sizes) // num_features
        samples = tuple(sum(batch_sizes[f * ranks : (f + 1) * ranks]) for f in range(num_features))
        elements = sum(count * dim for count, dim in zip(samples, spec.layout.feature_dims, strict=True))
        return BatchShape(samples, (elements,), 0)

    @cached_property
    def num_bags(self) -> int:
        return sum(self.samples) if self.entries is None else self.entries

    @cached_property
    def first_bags(self) -> list[int]:
        """[F + 1] the first bag of each feature."""
        return [0, *np.cumsum(self.samples).tolist()]

    def bags_of(self, features: Sequence[int]) -> int:
        """Without pooling all features are asked for together."""
        return sum(self.samples[feature] for feature in features) if self.entries is None else self.entries


class Segments(NamedTuple):
    """What the host knows of a batch with a batch size for each feature. Of segment f * ranks + r, the samples of
    feature f on rank r. Each is int64 and padded to an even length, so that all are aligned alike in one upload."""

    first_bag: Any  # [F * ranks]
    feature: Any  # [F * ranks]
    output_start: Any  # [F * ranks] element of the output where its first bag starts
    dim: Any  # [F * ranks]
    first_bags: Any  # [F + 1] first bag of each feature
    bucket_start: Any  # [F] place of each feature's first bag among the bags, bucket by bucket


def segments_of(batch_sizes: Sequence[int], spec: OperatorSpec) -> Segments:
    layout = spec.layout
    num_features = len(spec.feature_tables)
    counts = np.asarray(batch_sizes, dtype=np.int64).reshape(num_features, -1)
    dims = np.asarray(layout.feature_dims, dtype=np.int64)
    by_rank = (counts * dims[:, None]).T.flatten()  # elements, rank by rank
    samples = counts.sum(axis=1)
    order = np.asarray([f for bucket in layout.buckets for f in bucket.features])
    bucket_start = np.empty(num_features, dtype=np.int64)
    bucket_start[order] = np.cumsum(samples[order]) - samples[order]
    exact = Segments(
        first_bag=np.cumsum(counts.flatten()) - counts.flatten(),
        feature=np.repeat(np.arange(num_features), counts.shape[1]),
        output_start=(np.cumsum(by_rank) - by_rank).reshape(-1, num_features).T.flatten(),
        dim=np.repeat(dims, counts.shape[1]),
        first_bags=np.concatenate([[0], np.cumsum(samples)]),
        bucket_start=bucket_start,
    )
    last = samples.sum()  # no bag is searched for behind it
    return Segments(*(np.pad(part, (0, len(part) % 2), constant_values=last) for part in exact))


@triton.jit(do_not_specialize=["num_segments", "num_bags"])
def place_bags_kernel(vbe, segments, num_segments, num_bags, BLOCK: tl.constexpr):
    """Everything of `VbeLayout` that has an element for each bag."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = bag < num_bags
    segment = upper_bound(segments.first_bag, num_segments, tl.where(live, bag, 0)) - 1
    feature = tl.load(segments.feature + segment)
    number = bag - tl.load(segments.first_bag + segment)
    offset = tl.load(segments.output_start + segment) + number * tl.load(segments.dim + segment)
    place = tl.load(segments.bucket_start + feature) + bag - tl.load(segments.first_bags + feature)
    tl.store(vbe.bag_features + bag, feature.to(tl.int32), mask=live)
    tl.store(vbe.output_offsets + bag, offset, mask=live)
    tl.store(vbe.bucket_bags + place, bag.to(tl.int32), mask=live)


_captured: list[Tensor] = []  # what CUDA graphs copy from, for as long as the process lives


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers of the CPU on a device, without waiting for it: from pinned memory. A captured copy reads that at
    every replay, so it is kept."""
    if device.type != "cuda":
        return numbers.to(device)
    pinned = numbers.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured.append(pinned)
    return pinned.to(device, non_blocking=True)


def place_bags(offsets: Tensor, batch_sizes: Sequence[int], spec: OperatorSpec) -> VbeLayout:
    """Where each bag lies in the output: one copy of a few numbers for each feature and rank to the device, without
    waiting for it, and one launch."""
    device = offsets.device
    host = segments_of(batch_sizes, spec)
    uploaded = upload(torch.from_numpy(np.concatenate(host)), device)
    segments = Segments(*uploaded.split([len(part) for part in host]))
    if not uses_kernels(device):
        return reference_placement(segments, sum(batch_sizes), len(spec.feature_tables))
    num_bags = sum(batch_sizes)
    vbe = VbeLayout(
        first_bags=segments.first_bags[: len(spec.feature_tables) + 1],
        bag_features=torch.empty(num_bags, dtype=torch.int32, device=device),
        output_offsets=torch.empty(num_bags, dtype=torch.int64, device=device),
        bucket_bags=torch.empty(num_bags, dtype=torch.int32, device=device),
    )
    if num_bags:
        block = select_entry().block
        launch(
            place_bags_kernel,
            (cdiv(num_bags, block),),
            vbe=vbe,
            segments=segments,
            num_segments=len(host.first_bag),
            num_bags=num_bags,
            BLOCK=block,
        )
    return vbe


def reference_placement(segments: Segments, num_bags: int, num_features: int) -> VbeLayout:
    """The same by PyTorch."""
    bag = torch.arange(num_bags, device=segments.dim.device)
    segment = torch.searchsorted(segments.first_bag, bag, right=True) - 1
    feature = segments.feature[segment]
    place = segments.bucket_start[feature] + bag - segments.first_bags[feature]
    bucket_bags = torch.empty_like(bag, dtype=torch.int32)
    bucket_bags[place] = bag.to(torch.int32)
    return VbeLayout(
        first_bags=segments.first_bags[: num_features + 1],
        bag_features=feature.to(torch.int32),
        output_offsets=segments.output_start[segment] + (bag - segments.first_bag[segment]) * segments.dim[segment],
        bucket_bags=bucket_bags,
    )
