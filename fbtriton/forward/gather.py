"""The generic forward: sum the rows of each bag, feature by feature.

Two traversals, each for weighted and unweighted, sum and mean, all dtypes and index types: several rows of one bag side
by side (`gather_kernel`), which keeps a warp busy with a long bag, or several bags side by side (`gather_bags_kernel`),
for bags too short for that. The configuration says which; the second is not chosen by itself before it is measured.
Accumulation is fp32: the first adds the rows of a step into as many partial sums, which are added at the end, the
second adds the rows of each bag one after the other.
"""

from __future__ import annotations

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.config import select_gather
from fbtriton.layout import Bags, OperatorSpec
from fbtriton.rows import bag_bounds, bucket_bag, load_ids, load_tile, output_offset, scale_rows, tile_mask, write_stamp


@triton.jit
def sum_bag(
    weights_ptr, table_offset, table_rows, bags, begin, length,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sum of one bag's rows. table_offset, table_rows, begin, length scalars -> [BLOCK_D] fp32"""
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    lane = tl.arange(0, ROWS)
    for step in range(0, length, ROWS):
        position = begin + step + lane  # [ROWS]
        row, live = load_ids(bags.indices, position, step + lane < length, table_rows)
        tile = load_tile(weights_ptr, table_offset + row * DIM, live, DIM, BLOCK_D)  # [ROWS, BLOCK_D]
        total += scale_rows(tile, bags.sample_weights, position, live)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["first_bag", "batch_size", "num_entries", "num_columns"])
def gather_kernel(
    out_ptr, stamp_ptr,
    weights_ptr, hyperparameters_ptr, seed_and_step_ptr, bucket_features_ptr, features, bags,
    first_bag, batch_size, num_entries, num_columns,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MEAN: tl.constexpr,
    TABLE_ALIGNMENT: tl.constexpr, OUTPUT_ALIGNMENT: tl.constexpr, NUM_HYPERPARAMETERS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if stamp_ptr is not None:
        if program == 0:
            write_stamp(stamp_ptr, hyperparameters_ptr, seed_and_step_ptr, NUM_HYPERPARAMETERS)
    bag, feature = bucket_bag(bags, bucket_features_ptr, program, first_bag, batch_size)
    begin, length = bag_bounds(bags.offsets, bag, num_entries)
    table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), TABLE_ALIGNMENT)
    table_rows = tl.load(features.rows + feature)
    total = sum_bag(weights_ptr, table_offset, table_rows, bags, begin, length, DIM, BLOCK_D, ROWS)
    if MEAN:
        total *= 1.0 / tl.maximum(length, 1).to(tl.float32)
    # The alignment of the segment is stated, because both sizes are unknown to the compiler.
    offset = output_offset(bags, features, bag, feature, batch_size, num_columns)
    offset = tl.multiple_of(offset, OUTPUT_ALIGNMENT)
    column = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + offset + column, total.to(out_ptr.dtype.element_ty), mask=column < DIM)


@triton.jit
def sum_bags(
    weights_ptr, table_offset, table_rows, bags, begin, length,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sums of several bags' rows. table_offset, table_rows, begin, length [BAGS] -> [BAGS, BLOCK_D] fp32"""
    total = tl.zeros([begin.shape[0], BLOCK_D], tl.float32)
    for step in range(0, tl.max(length), ROWS):
        for unrolled in tl.static_range(ROWS):
            position = begin + step + unrolled  # [BAGS]
            row, live = load_ids(bags.indices, position, step + unrolled < length, table_rows)
            tile = load_tile(weights_ptr, table_offset + row * DIM, live, DIM, BLOCK_D)  # [BAGS, BLOCK_D]
            total += scale_rows(tile, bags.sample_weights, position, live)
    return total


@triton.jit(do_not_specialize=["first_bag", "num_bags", "batch_size", "num_entries", "num_columns"])
def gather_bags_kernel(
    out_ptr, stamp_ptr,
    weights_ptr, hyperparameters_ptr, seed_and_step_ptr, bucket_features_ptr, features, bags,
    first_bag, num_bags, batch_size, num_entries, num_columns,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BAGS: tl.constexpr, MEAN: tl.constexpr,
    TABLE_ALIGNMENT: tl.constexpr, OUTPUT_ALIGNMENT: tl.constexpr, NUM_HYPERPARAMETERS: tl.constexpr,
):  # fmt: skip
    """Another traversal than `gather_kernel`: the tile's rows are bags, so none is empty where bags hold one id."""
    program = tl.program_id(0).to(tl.int64)
    if stamp_ptr is not None:
        if program == 0:
            write_stamp(stamp_ptr, hyperparameters_ptr, seed_and_step_ptr, NUM_HYPERPARAMETERS)
    number = program * BAGS + tl.arange(0, BAGS)  # [BAGS]
    live = number < num_bags
    bag, feature = bucket_bag(bags, bucket_features_ptr, tl.where(live, number, 0), first_bag, batch_size)
    begin, length = bag_bounds(bags.offsets, bag, num_entries)
    length = tl.where(live, length, 0)
    table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), [TABLE_ALIGNMENT])
    table_rows = tl.load(features.rows + feature)
    total = sum_bags(weights_ptr, table_offset, table_rows, bags, begin, length, DIM, BLOCK_D, ROWS)
    if MEAN:
        total *= (1.0 / tl.maximum(length, 1).to(tl.float32))[:, None]
    offset = output_offset(bags, features, bag, feature, batch_size, num_columns)
    offset = tl.multiple_of(offset, [OUTPUT_ALIGNMENT])
    pointer = out_ptr + offset[:, None] + tl.arange(0, BLOCK_D)[None, :]
    tl.store(pointer, total.to(out_ptr.dtype.element_ty), mask=tile_mask(live, DIM, BLOCK_D))


def gather(
    *, out: Tensor, stamp: Tensor, weights: Tensor, hyperparameters: Tensor, seed_and_step: Tensor,
    bags: Bags, shape: BatchShape, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Fill out, of `shape.output_shape`: one launch for each dim. The first launch also writes the stamp."""
    layout = spec.layout
    on_device = layout.on_device(weights.device)
    first_bag = 0
    for number, bucket in enumerate(layout.buckets):
        config = select_gather(bucket.block_dim)
        num_bags = shape.bags_of(bucket)
        if num_bags == 0:
            continue
        side_by_side = {"num_bags": num_bags, "BAGS": config.bags_per_program} if config.bags_per_program > 1 else {}
        kernel = gather_bags_kernel if side_by_side else gather_kernel
        kernel[(triton.cdiv(num_bags, config.bags_per_program),)](
            out_ptr=out,
            stamp_ptr=stamp if first_bag == 0 else None,
            weights_ptr=weights,
            hyperparameters_ptr=hyperparameters,
            seed_and_step_ptr=seed_and_step,
            bucket_features_ptr=on_device.bucket_features[number],
            features=on_device.features,
            bags=bags,
            first_bag=first_bag,
            batch_size=shape.batch_size,
            num_entries=bags.indices.numel(),
            num_columns=layout.columns[-1],
            DIM=bucket.dim,
            BLOCK_D=bucket.block_dim,
            ROWS=config.rows_per_step,
            MEAN=spec.mean,
            TABLE_ALIGNMENT=layout.table_alignment,
            OUTPUT_ALIGNMENT=bucket.column_alignment if bags.vbe is None else layout.dim_alignment,
            NUM_HYPERPARAMETERS=hyperparameters.numel(),
            num_warps=config.num_warps,
            **side_by_side,
        )
        first_bag += num_bags
