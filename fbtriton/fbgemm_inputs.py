"""Arguments of FBGEMM's forward that the operator does not have: PyTorch around it, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fbtriton.arguments import check_bags
from fbtriton.batch import upload


def without_some_gradients(
    per_sample_weights: Tensor,
    feature_requires_grad: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
    num_features: int,
) -> Tensor:
    """The same weights [N], whose gradient is zero in every feature with feature_requires_grad 0.

    Args:
        feature_requires_grad: [F] of an integer or bool dtype.
        offsets: [bags + 1]. An entry in no bag has no gradient in any case.
        batch_sizes: [F][ranks], or None where all features have one batch size.

    Raises:
        ValueError: feature_requires_grad has another shape or dtype, or offsets has another size than the bags ask for.
    """
    if feature_requires_grad.shape != (num_features,) or feature_requires_grad.dtype.is_floating_point:
        raise ValueError(
            f"feature_requires_grad must have one integer for each of {num_features} features, got"
            f" {feature_requires_grad.dtype} of shape {list(feature_requires_grad.shape)}"
        )
    check_bags(offsets, batch_sizes, num_features)
    if not per_sample_weights.requires_grad or offsets.numel() <= 1:
        return per_sample_weights
    if batch_sizes is None:
        ends = offsets[:: (offsets.numel() - 1) // num_features][1:]
    else:
        last_bags = list(accumulate(sum(sizes) for sizes in batch_sizes))
        ends = offsets[upload(torch.tensor(last_bags), offsets.device)]
    entry = torch.arange(per_sample_weights.numel(), dtype=ends.dtype, device=ends.device)
    feature = torch.searchsorted(ends.cummax(0).values, entry, right=True).clamp_max(num_features - 1)
    kept = feature_requires_grad.to(per_sample_weights.device)[feature] != 0
    return torch.where(kept, per_sample_weights, per_sample_weights.detach())


def check_vbe_output(
    vbe_output: Tensor | None,
    vbe_output_offsets: Tensor | None,
    batch_sizes: Sequence[Sequence[int]] | None,
    dtype: torch.dtype,
) -> None:
    """ValueError unless both are None, or fit each other and the batch sizes."""
    if vbe_output is None and vbe_output_offsets is None:
        return
    if vbe_output is None or vbe_output_offsets is None or batch_sizes is None:
        raise ValueError(
            "vbe_output and vbe_output_offsets must be given together, and with batch_size_per_feature_per_rank"
        )
    if vbe_output.dtype != dtype or not vbe_output.is_contiguous():
        raise ValueError(f"vbe_output must be contiguous and {dtype}, got {vbe_output.dtype}, {vbe_output.stride()}")
    expected = (len(batch_sizes[0]), len(batch_sizes))
    if vbe_output_offsets.shape != expected or vbe_output_offsets.dtype != torch.int64:
        raise ValueError(
            f"vbe_output_offsets must be int64 of shape [ranks, features] = {list(expected)}, got"
            f" {vbe_output_offsets.dtype} of shape {list(vbe_output_offsets.shape)}"
        )


def write_vbe_output(
    output: Tensor,
    vbe_output: Tensor,
    vbe_output_offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]],
    dims: list[int],
) -> Tensor:
    """Copy output, rank by rank and feature by feature, to where vbe_output_offsets says. Returns vbe_output, which is
    written in place and differentiable.

    Example, two features of dim 2, one rank with batch sizes 1 and 2, offsets [[4, 0]]: output a a b b b b becomes
    b b b b a a.
    """
    num_ranks = len(batch_sizes[0])
    sizes = [sizes[rank] * dim for rank in range(num_ranks) for sizes, dim in zip(batch_sizes, dims, strict=True)]
    starts = [0, *accumulate(sizes)]
    numbers = upload(torch.tensor([*sizes, *starts[:-1]]), output.device)
    shifts = vbe_output_offsets.flatten() - numbers[len(sizes) :]
    places = shifts.repeat_interleave(numbers[: len(sizes)], output_size=starts[-1])
    places = places + torch.arange(starts[-1], device=output.device)
    vbe_output.view(-1).index_copy_(0, places, output)
    return vbe_output
