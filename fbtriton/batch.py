"""How many samples each feature has: one batch size for all, or one for each feature (VBE).

With a batch size for each feature and rank the output has one dimension, rank by rank, feature by feature, sample by
sample, as FBGEMM's `batch_size_per_feature_per_rank` has it. Bags stay feature-major: feature 0's samples of rank 0,
of rank 1, ..., feature 1's samples of rank 0, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fbtriton.layout import Bucket, OperatorSpec, VbeLayout


@dataclass(frozen=True)
class BatchShape:
    """The samples of each feature, on the host.

    Attributes:
        samples: for each feature its number of samples over all ranks.
        output_shape: (B, columns), or (elements,) with a batch size for each feature.
        batch_size: B; 0 with a batch size for each feature.
    """

    samples: tuple[int, ...]
    output_shape: tuple[int, ...]
    batch_size: int

    @staticmethod
    def of(offsets: Tensor, batch_sizes: Sequence[int], spec: OperatorSpec) -> BatchShape:
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
        return sum(self.samples)

    @cached_property
    def first_bags(self) -> list[int]:
        """[F + 1] the first bag of each feature."""
        return [0, *np.cumsum(self.samples).tolist()]

    def bags_of(self, bucket: Bucket) -> int:
        return sum(self.samples[feature] for feature in bucket.features)


def place_bags(offsets: Tensor, batch_sizes: Sequence[int], spec: OperatorSpec) -> VbeLayout:
    """Where each bag lies in the output. Copies a few numbers for each feature and rank to the device, without
    waiting for it."""
    layout, device = spec.layout, offsets.device
    num_features = len(spec.feature_tables)
    counts = np.asarray(batch_sizes, dtype=np.int64).reshape(num_features, -1)
    dims = np.asarray(layout.feature_dims, dtype=np.int64)
    sizes = counts * dims[:, None]  # elements of each feature and rank
    starts = np.cumsum(sizes.T.flatten()) - sizes.T.flatten()  # rank by rank
    starts = starts.reshape(-1, num_features).T
    features = np.broadcast_to(np.arange(num_features)[:, None], counts.shape)
    first = np.cumsum(counts.flatten()) - counts.flatten()
    samples = counts.sum(axis=1)
    first_bags = np.concatenate([[0], np.cumsum(samples)])
    bucket_order = np.asarray([f for bucket in layout.buckets for f in bucket.features])

    segments = np.stack(
        [counts.flatten(), features.flatten(), starts.flatten(), first, np.repeat(dims, counts.shape[1])]
    )
    ordered = np.stack([samples[bucket_order], first_bags[bucket_order]])
    upload = torch.from_numpy(np.concatenate([segments.flatten(), ordered.flatten(), first_bags]))
    if device.type == "cuda":
        upload = upload.pin_memory()
    upload = upload.to(device, non_blocking=True)
    segments_end, ordered_end = segments.size, segments.size + ordered.size
    count, feature, start, first_bag, dim = upload[:segments_end].view(5, -1)
    ordered_count, ordered_first = upload[segments_end:ordered_end].view(2, -1)

    num_bags = int(samples.sum())
    bag = torch.arange(num_bags, device=device)

    def spread(values: Tensor, by: Tensor) -> Tensor:
        return torch.repeat_interleave(values, by, output_size=num_bags)

    before = torch.cumsum(ordered_count, 0) - ordered_count
    return VbeLayout(
        first_bags=upload[ordered_end:].clone(),
        bag_features=spread(feature, count).to(torch.int32),
        output_offsets=spread(start, count) + (bag - spread(first_bag, count)) * spread(dim, count),
        bucket_bags=(bag + spread(ordered_first - before, ordered_count)).to(torch.int32),
    )
