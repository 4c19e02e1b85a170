"""Gradient of the per-sample weights: the dot product of each entry's row with its bag's gradient, one bag a program.

It reads the rows as they were before the update, so it runs before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.config import select_sample_grad
from fbtriton.launch import launch
from fbtriton.layout import Bags
from fbtriton.rows import bag_bounds, bucket_bag, load_ids, load_tile, mean_factor, output_offset
from fbtriton.spec import OperatorSpec


@triton.jit(do_not_specialize=["first_bag", "batch_size", "num_entries"])
def sample_weights_grad_kernel(
    out_ptr, grad_ptr, weights_ptr, bucket_features_ptr, features, bags,
    first_bag, batch_size, num_entries, grad_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MEAN: tl.constexpr,
    TABLE_ALIGNMENT: tl.constexpr, GRAD_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    bag, feature = bucket_bag(bags, bucket_features_ptr, program, first_bag, batch_size)
    begin, length = bag_bounds(bags.offsets, bag, num_entries)
    table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), TABLE_ALIGNMENT)
    table_rows = tl.load(features.rows + feature)
    column = tl.arange(0, BLOCK_D)
    offset = output_offset(bags, features, bag, feature, batch_size, grad_stride)
    offset = tl.multiple_of(offset, GRAD_ALIGNMENT)
    grad = tl.load(grad_ptr + offset + column, mask=column < DIM, other=0.0).to(tl.float32)
    if MEAN:
        grad *= mean_factor(length)
    lane = tl.arange(0, ROWS)
    for step in range(0, length, ROWS):
        position = begin + step + lane  # [ROWS]
        inside = step + lane < length
        row, live = load_ids(bags.indices, position, inside, table_rows)
        tile = load_tile(weights_ptr, table_offset + row * DIM, live, DIM, BLOCK_D)  # [ROWS, BLOCK_D]
        dot = tl.sum(tile * grad[None, :], axis=1)
        tl.store(out_ptr + position, tl.where(live, dot, 0.0), mask=inside)


def sample_weights_grad(
    *, weights: Tensor, bags: Bags, shape: BatchShape, grad_output: Tensor, grad_alignments: tuple[int, ...],
    spec: OperatorSpec,
) -> Tensor:  # fmt: skip
    """[N] fp32; 0 for pruned ids and padding."""
    layout = spec.layout
    on_device = layout.on_device(weights.device)
    out = torch.zeros_like(bags.indices, dtype=torch.float32)
    first_bag = 0
    for number, bucket in enumerate(layout.buckets):
        config = select_sample_grad(bucket.block_dim)
        num_bags = shape.bags_of(bucket.features)
        if num_bags == 0:
            continue
        launch(
            sample_weights_grad_kernel,
            (num_bags,),
            out_ptr=out,
            grad_ptr=grad_output,
            weights_ptr=weights,
            bucket_features_ptr=on_device.bucket_features[number],
            features=on_device.features,
            bags=bags,
            first_bag=first_bag,
            batch_size=shape.batch_size,
            num_entries=bags.indices.numel(),
            grad_stride=grad_output.stride(0),
            DIM=bucket.dim,
            BLOCK_D=bucket.block_dim,
            ROWS=config.rows_per_step,
            MEAN=spec.mean,
            TABLE_ALIGNMENT=layout.table_alignment,
            GRAD_ALIGNMENT=grad_alignments[number],
            num_warps=config.num_warps,
        )
        first_bag += num_bags
    return out
