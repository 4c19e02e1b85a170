"""The generic forward: sum the rows of each bag, feature by feature.

One traversal for weighted and unweighted, sum and mean, all dtypes and index types, with or without a check of the ids.
A program's tile has BAGS x ROWS rows: some bags of one feature side by side, and some rows of each bag. Accumulation
is fp32: each of a bag's ROWS lanes adds every ROWS-th row, and the lanes are added at the end.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.bounds_check import chunk_size, counting_report, has_bad_offset, repair_bags, report_ids_of_bags
from fbtriton.config import GatherConfig, planned, select_gather, target_of
from fbtriton.forward.routing import bag_length
from fbtriton.launch import Constants, cdiv, launch, launch_options
from fbtriton.layout import Bags, BoundsCheck, Bucket
from fbtriton.rows import (
    bag_bounds,
    bucket_bag,
    first_bag_of,
    is_row,
    load_checked_ids,
    mean_factor,
    program_block,
    store_tile,
    write_stamp,
)  # fmt: skip
from fbtriton.spec import OperatorSpec


@triton.jit
def bags_of_program(bags, bucket_features_ptr, number, first_bag, num_bags, batch_size, BAGS: tl.constexpr):
    """The bags of this program, all of one feature unless every feature has a batch size of its own.

    number [K] in [0, BAGS) -> bag, sample [K] int64, feature scalar or [K] int64, live [K]. first_bag counts the bags
    of earlier buckets.
    """
    if bags.vbe is None:
        feature_number, first_sample = program_block(batch_size, BAGS)
        feature = tl.load(bucket_features_ptr + feature_number)
        sample = first_sample + number
        live = sample < batch_size
        sample = tl.where(live, sample, 0).to(tl.int64)
        bag = feature * batch_size + sample
    else:
        place = tl.program_id(0).to(tl.int64) * BAGS + number
        live = place < num_bags
        bag, feature = bucket_bag(bags, bucket_features_ptr, tl.where(live, place, 0), first_bag, batch_size)
        sample = bag - first_bag_of(bags.vbe, feature, batch_size)
    return bag, sample, feature, live


@triton.jit
def sum_rows(
    weights_ptr, table_offset, table_rows, bags, begin, length, longest, lane, first_column,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, MARK_BAD: tl.constexpr,
):  # fmt: skip
    """What each lane adds of its bag: rows lane, lane + ROWS, ... begin, length, lane [R, 1] -> [R, BLOCK_D] fp32

    An id out of range adds row 0; with MARK_BAD it makes the sum NaN, which costs nothing while there is none.
    """
    total = tl.zeros([lane.shape[0], BLOCK_D], tl.float32)
    number_of_column = tl.arange(0, BLOCK_D)[None, :]
    column = first_column + number_of_column
    marked = number_of_column % (128 // weights_ptr.dtype.element_ty.primitive_bitwidth) == 0  # one of 16 bytes will do
    if DIM % BLOCK_D != 0:
        marked = marked & (column < DIM)  # columns that are not there must not look like a bad id
    for step in range(0, longest, ROWS * UNROLL):
        for unrolled in tl.static_range(UNROLL):
            number = step + unrolled * ROWS + lane
            position = begin + number
            if MARK_BAD:
                row = tl.load(bags.indices + position, mask=number < length, other=-1)
                live = is_row(row, table_rows)
                fill = tl.where((row != -1) & marked, float("nan"), 0.0).to(weights_ptr.dtype.element_ty)
            else:
                row, live, bad = load_checked_ids(bags.indices, position, number < length, table_rows)
                fill = 0.0
            pointer = weights_ptr + (table_offset + row.to(tl.int64) * DIM) + column
            mask = live
            if DIM % BLOCK_D != 0:
                mask = mask & (column < DIM)
            tile = tl.load(pointer, mask=mask, other=fill).to(tl.float32)
            if bags.sample_weights is not None:
                tile *= tl.load(bags.sample_weights + position, mask=live, other=0.0)
            total += tile
    return total


@triton.jit
def store_bags(
    out_ptr, total, offsets_ptr, bags, features, bucket_features_ptr, first_column,
    first_bag, num_bags, batch_size, num_entries, num_columns,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAGS: tl.constexpr, ROWS: tl.constexpr, MEAN: tl.constexpr,
    OUTPUT_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Add the lanes of each bag and store the sums or means. total [BAGS * ROWS, BLOCK_D]"""
    pooled = tl.sum(tl.reshape(total, (BAGS, ROWS, BLOCK_D)), axis=1)  # [BAGS, BLOCK_D]
    bag, sample, feature, live = bags_of_program(
        bags, bucket_features_ptr, tl.arange(0, BAGS), first_bag, num_bags, batch_size, BAGS
    )
    if bags.vbe is None:
        offset = sample * num_columns + tl.load(features.column + feature)
    else:
        offset = tl.load(bags.vbe.output_offsets + bag)
    if MEAN:
        _, length = bag_bounds(offsets_ptr, bag, num_entries)
        pooled *= mean_factor(length)[:, None]
    offset = tl.multiple_of(offset, [OUTPUT_ALIGNMENT])
    store_tile(out_ptr, offset, pooled, live, DIM, BLOCK_D, first_column)


@triton.jit(do_not_specialize=["first_bag", "num_bags", "batch_size", "num_entries", "num_columns", "chunk"])
def gather_kernel(
    out_ptr, stamp_ptr, report_ptr, check,
    weights_ptr, hyperparameters_ptr, seed_and_step_ptr, iteration_ptr, bucket_features_ptr, features, bags,
    first_bag, num_bags, batch_size, num_entries, num_columns, chunk,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAGS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    MEAN: tl.constexpr, TABLE_ALIGNMENT: tl.constexpr, OUTPUT_ALIGNMENT: tl.constexpr,
    NUM_HYPERPARAMETERS: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    write_stamp(stamp_ptr, hyperparameters_ptr, seed_and_step_ptr, iteration_ptr, NUM_HYPERPARAMETERS)
    first_column = tl.program_id(1) * BLOCK_D
    offsets_ptr = bags.offsets
    if check is not None:
        offsets_ptr = check.repaired
    # Two dimensions from the start, [R, 1], so that ids are loaded where the rows of the tile are wanted: converted
    # from one dimension they would go through shared memory in every step.
    row_of_tile = tl.arange(0, BAGS * ROWS)[:, None]
    lane = row_of_tile % ROWS  # of the bag
    bag, sample, feature, live = bags_of_program(
        bags, bucket_features_ptr, row_of_tile // ROWS, first_bag, num_bags, batch_size, BAGS
    )
    begin, length = bag_bounds(offsets_ptr, bag, num_entries)
    length = tl.where(live, length, 0)
    # Alignments are stated where the values are loaded: the compiler cannot see them, and a helper would lose them.
    if bags.vbe is None:
        table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), TABLE_ALIGNMENT)
    else:
        table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), [TABLE_ALIGNMENT, TABLE_ALIGNMENT])
    table_rows = tl.load(features.rows + feature)
    longest = tl.max(length)
    if check is not None:
        ever_bad = tl.load(check.ever_bad)  # long before it is used
    MARK_BAD: tl.constexpr = check is not None and report_ptr is not None
    total = sum_rows(
        weights_ptr, table_offset, table_rows, bags, begin, length, longest, lane, first_column,
        DIM, BLOCK_D, ROWS, UNROLL, MARK_BAD,
    )  # fmt: skip
    if check is not None:
        bad_offset = has_bad_offset(check, ever_bad)
        suspicious = bad_offset
        if MARK_BAD:
            mark = tl.sum(total)  # NaN if an id was bad; or of rows that hold NaN, or infinities that cancel
            suspicious = suspicious | (mark != mark)
        if suspicious:  # rare: report and repair what is bad, and sum again
            counted = live & (lane == 0) & (first_column == 0)
            if bad_offset:
                repair_bags(check, report_ptr, bags.offsets, bag, counted, num_entries, chunk)
            begin, length = bag_bounds(check.repaired, bag, num_entries)
            length = tl.where(live, length, 0)
            if report_ptr is not None:
                if first_column == 0:
                    report_ids_of_bags(
                        check, report_ptr, bags.indices, feature, table_rows, sample, begin, length, lane, ROWS, FATAL
                    )
            total = sum_rows(
                weights_ptr, table_offset, table_rows, bags, begin, length, tl.max(length), lane, first_column,
                DIM, BLOCK_D, ROWS, UNROLL, False,
            )  # fmt: skip
    store_bags(
        out_ptr, total, offsets_ptr, bags, features, bucket_features_ptr, first_column,
        first_bag, num_bags, batch_size, num_entries, num_columns,
        DIM, BLOCK_D, BAGS, ROWS, MEAN, OUTPUT_ALIGNMENT,
    )  # fmt: skip


def gather_grid(dim: int, num_features: int, num_bags: int, config: GatherConfig, shape: BatchShape) -> tuple[int, int]:
    """Programs for the bags, and for the columns of wide rows."""
    bags = config.bags_per_program
    if shape.batch_size:
        blocks = num_features * cdiv(shape.batch_size, bags)
    else:
        blocks = cdiv(num_bags, bags)
    return blocks, cdiv(dim, config.columns)


class BagsForm(NamedTuple):
    """What of the bags selects a variant of the kernel."""

    id_bytes: int
    weighted: bool
    vbe: bool


@planned
def plan_gather(
    spec: OperatorSpec, bucket: Bucket, config: GatherConfig, form: BagsForm, num_hyperparameters: int, fatal: bool
) -> Constants:
    layout = spec.layout
    registers = registers_for(config, bucket, spec.torch_weights_dtype.itemsize, form)
    return Constants(
        DIM=bucket.dim,
        BLOCK_D=min(bucket.block_dim, config.columns),
        BAGS=config.bags_per_program,
        ROWS=config.rows_per_bag,
        UNROLL=config.unroll,
        MEAN=spec.mean,
        TABLE_ALIGNMENT=layout.table_alignment,
        OUTPUT_ALIGNMENT=layout.dim_alignment if form.vbe else bucket.column_alignment,
        NUM_HYPERPARAMETERS=num_hyperparameters,
        FATAL=fatal,
        debug=fatal,
        **launch_options(config.num_warps, registers),
    )


def registers_for(config: GatherConfig, bucket: Bucket, itemsize: int, form: BagsForm) -> int | None:
    """More than the configuration says where a program has bags of several tables, rows need several narrow loads, or
    there are weights, above all beside wide ids: with fewer the loop over the rows would spill."""
    if config.registers is None:
        return None
    narrow = bucket.has_narrow_rows(itemsize)
    return config.registers + 16 * form.vbe + 32 * narrow + 2 * form.id_bytes * form.weighted


def gather(
    *, out: Tensor, stamp: Tensor | None, weights: Tensor, hyperparameters: Tensor, seed_and_step: Tensor,
    iteration: Tensor | None, bags: Bags, check: BoundsCheck | None, report: Tensor | None,
    parts: tuple[tuple[Bucket, tuple[int, ...]], ...], shape: BatchShape, spec: OperatorSpec,
) -> None:  # fmt: skip
    """Fill the parts of some features in out, of `shape.output_shape`: one launch for each bucket in parts.

    The first launch also writes the stamp, if one is given. With `check` the launches also report and repair what is
    bad, offsets included. With a batch size for each feature, parts must have all of them.
    """
    layout, device = spec.layout, weights.device
    features = layout.on_device(device).features
    counting, chunk = counting_report(report, spec), chunk_size(bags.offsets.numel())
    gpu, itemsize = target_of(device).name, weights.element_size()
    num_entries = bags.indices.numel()
    mean_length = num_entries / shape.num_bags
    fatal = spec.bounds_check == "fatal" and check is not None
    form = BagsForm(bags.indices.element_size(), bags.sample_weights is not None, bags.vbe is not None)
    first_bag = 0
    for bucket, chosen in parts:
        num_bags = shape.bags_of(chosen)
        if num_bags == 0:
            continue
        config, _ = select_gather(gpu, bucket.dim, itemsize, bag_length(spec, chosen, mean_length))
        launch(
            gather_kernel,
            gather_grid(bucket.dim, len(chosen), num_bags, config, shape),
            plan_gather(spec, bucket, config, form, hyperparameters.numel(), fatal),
            out_ptr=out,
            stamp_ptr=stamp if first_bag == 0 else None,
            report_ptr=counting,
            check=check,
            weights_ptr=weights,
            hyperparameters_ptr=hyperparameters,
            seed_and_step_ptr=seed_and_step,
            iteration_ptr=iteration,
            bucket_features_ptr=layout.numbers_on_device(chosen, device),
            features=features,
            bags=bags,
            first_bag=first_bag,
            num_bags=num_bags,
            batch_size=shape.batch_size,
            num_entries=num_entries,
            num_columns=layout.columns[-1],
            chunk=chunk,
        )
        first_bag += num_bags
