"""What a call may be given: dtypes, shapes and devices, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fbtriton.spec import OperatorSpec

MAX_ENTRIES = 2**31 - 2**20  # kernels count entries in int32, and a loop's last step may go past the end


def check_ids_and_offsets(indices: Tensor, offsets: Tensor, device: torch.device) -> None:
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device} like the weights, got {tensor.device}")
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.numel() > MAX_ENTRIES:
            raise ValueError(f"{name} must have at most {MAX_ENTRIES} elements, got {tensor.numel()}")


def check_bags(offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None, num_features: int) -> list[int]:
    """The flat batch sizes, empty without any."""
    if batch_sizes is None:
        if offsets.numel() == 0 or (offsets.numel() - 1) % num_features:
            raise ValueError(
                f"offsets must have F * B + 1 elements with F = {num_features} features, got {offsets.numel()}"
            )
        return []
    if len(batch_sizes) != num_features or len({len(sizes) for sizes in batch_sizes}) != 1 or not batch_sizes[0]:
        raise ValueError(
            f"batch_sizes must have a list of batch sizes, one for each rank, for each of {num_features} features,"
            f" got {batch_sizes!r}"
        )
    flat = [size for sizes in batch_sizes for size in sizes]
    if any(size < 0 for size in flat):
        raise ValueError(f"batch_sizes must not be negative, got {batch_sizes!r}")
    if offsets.numel() != sum(flat) + 1:
        raise ValueError(
            f"offsets must have {sum(flat) + 1} elements, one more than the sum of batch_sizes, got {offsets.numel()}"
        )
    return flat


def check_sample_weights(sample_weights: Tensor, indices: Tensor) -> None:
    if not sample_weights.dtype.is_floating_point:
        raise ValueError(f"per_sample_weights must be of a floating-point dtype, got {sample_weights.dtype}")
    if sample_weights.shape != indices.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of indices, {list(indices.shape)},"
            f" got {list(sample_weights.shape)}"
        )
    if sample_weights.device != indices.device:
        raise ValueError(f"per_sample_weights must be on {indices.device} like indices, got {sample_weights.device}")


def check_unique(total_unique_indices: int, indices: Tensor, spec: OperatorSpec) -> None:
    if spec.optimizer != "none":
        raise ValueError(f"total_unique_indices must be None with an optimizer, got {total_unique_indices!r}")
    if not 0 <= total_unique_indices <= indices.numel():
        raise ValueError(
            f"total_unique_indices must be in [0, {indices.numel()}], the number of indices,"
            f" got {total_unique_indices!r}"
        )
