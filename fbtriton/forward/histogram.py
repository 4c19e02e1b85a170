"""The forward for small tables: count how often each bag holds each row, then multiply the counts by the table.

    counts[bag, row] = how many ids of the bag are that row          one launch for all features that go this way
    output[bag, :]   = sum over rows of counts[bag, row] * table[row, :]       one launch for each dim, tensor cores

A bag of L ids costs L counts in registers instead of L rows of D elements through the caches. Counts are one byte. A
count of 255 or more does not fit; the second kernel counts such a bag again and multiplies it in fp32. So it does with
a bag whose sum is NaN, as every row takes part in every product and 0 times infinity is NaN: what is not finite
reaches only the bags that hold its row. The counts are kept for `fbtriton.backward.histogram`.

Error: counts up to 254 are exact in fp16 and tf32. fp16 weights are multiplied as they are, bf16 weights as tf32,
which holds them exactly; the products are exact in the fp32 accumulator. fp32 weights are split into two tf32 parts,
which leaves 2^-21 of a weight. So a sum differs from the gather's by its order of additions and, for fp32 weights, by
at most 2^-21 of the sum of magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.bounds_check import chunk_size, counting_report, has_bad_offset, repair_bags, report_ids_of_bags
from fbtriton.config import HistogramConfig
from fbtriton.forward.routing import count_bins, counted_features
from fbtriton.launch import cdiv, launch, launch_options
from fbtriton.layout import Bags, BoundsCheck
from fbtriton.rows import (
    bag_bounds,
    is_row,
    load_checked_ids,
    mean_factor,
    program_block,
    store_tile,
    tile_mask,
    tile_pointer,
    write_stamp,
)  # fmt: skip
from fbtriton.spec import OperatorSpec

OVERFLOW = 255
COUNT_OVERFLOW = tl.constexpr(OVERFLOW)
BLOCK_BINS = 64  # rows of a table in one product


@triton.jit
def feature_and_samples(feature_list_ptr, batch_size, BAGS: tl.constexpr):
    """Which feature of the list this program works on (number and feature), and its samples [BAGS] int64."""
    number, first_sample = program_block(batch_size, BAGS)
    sample = (first_sample + tl.arange(0, BAGS)).to(tl.int64)
    return number.to(tl.int64), tl.load(feature_list_ptr + number), sample


@triton.jit
def count_bag(
    indices_ptr, begin, length, table_rows, first_row, IDS: tl.constexpr, BINS: tl.constexpr, REPAIR: tl.constexpr
):
    """How often a bag holds each of the rows first_row to first_row + BINS - 1 [BINS]. An id out of range counts as
    row 0 with REPAIR, and not at all without."""
    counts = tl.zeros([BINS], tl.int32)
    for step in range(0, length, IDS):
        number = step + tl.arange(0, IDS)  # [IDS]
        if REPAIR:
            row, live, bad = load_checked_ids(indices_ptr, begin + number, number < length, table_rows)
        else:
            row = tl.load(indices_ptr + begin + number, mask=number < length, other=-1)
            live = is_row(row, table_rows)
        bin = row.to(tl.int32) - first_row
        counts += tl.histogram(bin, BINS, mask=live & (bin >= 0) & (bin < BINS))
    return counts


@triton.jit
def count_bags(
    counts_ptr, offsets_ptr, bags, number, feature, table_rows, first, batch_size, num_entries,
    IDS: tl.constexpr, BINS: tl.constexpr, BAGS: tl.constexpr, REPAIR: tl.constexpr,
):  # fmt: skip
    """Count one bag after the other and store the counts, kept at 255; whether an id was not counted."""
    counted = tl.zeros([BINS], tl.int32)
    num_ids = 0
    for sample in range(first, tl.minimum(first + BAGS, batch_size)):
        begin, length = bag_bounds(offsets_ptr, feature * batch_size + sample, num_entries)
        counts = count_bag(bags.indices, begin, length, table_rows, 0, IDS, BINS, REPAIR)
        counted += counts
        num_ids += length
        place = (number * batch_size + sample) * BINS + tl.arange(0, BINS)
        tl.store(counts_ptr + place, tl.minimum(counts, COUNT_OVERFLOW).to(tl.uint8))
    return tl.sum(counted) != num_ids


@triton.jit(do_not_specialize=["batch_size", "num_entries", "chunk"])
def count_kernel(
    counts_ptr, stamp_ptr, report_ptr, check,
    hyperparameters_ptr, seed_and_step_ptr, iteration_ptr, feature_list_ptr, features, bags,
    batch_size, num_entries, chunk,
    IDS: tl.constexpr, BINS: tl.constexpr, BAGS: tl.constexpr, NUM_HYPERPARAMETERS: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    """counts [features of the list, batch_size, BINS] uint8."""
    write_stamp(stamp_ptr, hyperparameters_ptr, seed_and_step_ptr, iteration_ptr, NUM_HYPERPARAMETERS)
    number, feature, sample = feature_and_samples(feature_list_ptr, batch_size, BAGS)
    offsets_ptr = bags.offsets
    if check is not None:
        offsets_ptr = check.repaired
        ever_bad = tl.load(check.ever_bad)  # long before it is used
    table_rows = tl.load(features.rows + feature)
    first = tl.min(sample)
    missing = count_bags(
        counts_ptr, offsets_ptr, bags, number, feature, table_rows, first, batch_size, num_entries,
        IDS, BINS, BAGS, False,
    )  # fmt: skip
    bad_offset = False
    if check is not None:
        bad_offset = has_bad_offset(check, ever_bad)
    if missing | bad_offset:  # rare: report and repair what is bad, and count again
        if check is not None:
            inside = sample < batch_size
            sample = tl.where(inside, sample, 0)
            bag = feature * batch_size + sample
            if bad_offset:
                repair_bags(check, report_ptr, bags.offsets, bag, inside, num_entries, chunk)
            if report_ptr is not None:
                begin, length = bag_bounds(offsets_ptr, bag, num_entries)
                length = tl.where(inside, length, 0)
                lane = tl.zeros_like(length)
                report_ids_of_bags(
                    check, report_ptr, bags.indices, feature, table_rows, sample, begin, length, lane, 1, FATAL
                )
        count_bags(
            counts_ptr, offsets_ptr, bags, number, feature, table_rows, first, batch_size, num_entries,
            IDS, BINS, BAGS, True,
        )  # fmt: skip


@triton.jit
def multiply_counts(counts, table, total):
    """total + counts @ table on the tensor cores; see the module. counts [BAGS, BINS] uint8, table [BINS, BLOCK_D]"""
    if table.dtype == tl.float16:
        total = tl.dot(counts.to(tl.float16), table, total)
    elif table.dtype == tl.bfloat16:
        total = tl.dot(counts.to(tl.float32), table.to(tl.float32), total, input_precision="tf32")
    else:
        high = (table.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        counts = counts.to(tl.float32)
        total = tl.dot(counts, table - high, total, input_precision="tf32")
        total = tl.dot(counts, high, total, input_precision="tf32")
    return total


@triton.jit
def load_rows_of_table(
    weights_ptr, table_offset, table_rows, row, first_column, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Neighbouring rows, in their dtype. row [BINS] int32 -> [BINS, BLOCK_D], 0 past the table"""
    pointer = tile_pointer(weights_ptr + table_offset, row * DIM, BLOCK_D, first_column)
    return tl.load(pointer, mask=tile_mask(row < table_rows, DIM, BLOCK_D, first_column), other=0.0)


@triton.jit(do_not_specialize=["batch_size", "num_entries", "num_columns"])
def pool_counts_kernel(
    out_ptr, weights_ptr, counts_ptr, feature_list_ptr, counts_number_ptr, features, bags,
    batch_size, num_entries, num_columns,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BINS: tl.constexpr, BLOCK_BINS: tl.constexpr, BAGS: tl.constexpr,
    IDS: tl.constexpr, MEAN: tl.constexpr, TABLE_ALIGNMENT: tl.constexpr, OUTPUT_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Counts times table. counts_number [features of the list]: where a feature stands in the counts."""
    first_column = tl.program_id(1) * BLOCK_D
    number, feature, sample = feature_and_samples(feature_list_ptr, batch_size, BAGS)
    inside = sample < batch_size  # [BAGS]
    counts_row = tl.load(counts_number_ptr + number) * batch_size + tl.where(inside, sample, 0)
    table_rows = tl.load(features.rows + feature)
    table_offset = tl.multiple_of(tl.load(features.weight_offset + feature), TABLE_ALIGNMENT)
    total = tl.zeros([BAGS, BLOCK_D], tl.float32)
    overflows = tl.zeros([BAGS], tl.int32)
    for first in range(0, BINS, BLOCK_BINS):
        row = first + tl.arange(0, BLOCK_BINS)
        counts = tl.load(counts_ptr + counts_row[:, None] * BINS + row[None, :], mask=inside[:, None], other=0)
        overflows = tl.maximum(overflows, tl.max(counts.to(tl.int32), axis=1))
        table = load_rows_of_table(weights_ptr, table_offset, table_rows, row, first_column, DIM, BLOCK_D)
        total = multiply_counts(counts, table, total)
    mark = tl.sum(total, axis=1)
    inexact = (overflows == COUNT_OVERFLOW) | (mark != mark)  # [BAGS]
    if tl.max(inexact.to(tl.int32)) > 0:
        for lane in range(BAGS):
            chosen = tl.arange(0, BAGS) == lane
            if tl.max((chosen & inexact).to(tl.int32)) > 0:
                bag = tl.sum(tl.where(chosen, feature * batch_size + sample, 0))
                begin, length = bag_bounds(bags.offsets, bag, num_entries)
                exact = tl.zeros([BLOCK_D], tl.float32)
                for first in range(0, BINS, BLOCK_BINS):
                    row = first + tl.arange(0, BLOCK_BINS)
                    counts = count_bag(bags.indices, begin, length, table_rows, first, IDS, BLOCK_BINS, True)[:, None]
                    table = load_rows_of_table(weights_ptr, table_offset, table_rows, row, first_column, DIM, BLOCK_D)
                    exact += tl.sum(tl.where(counts > 0, counts.to(tl.float32) * table.to(tl.float32), 0.0), axis=0)
                total = tl.where(chosen[:, None], exact[None, :], total)
    if MEAN:
        _, length = bag_bounds(bags.offsets, feature * batch_size + tl.where(inside, sample, 0), num_entries)
        total *= mean_factor(length)[:, None]
    offset = tl.multiple_of(sample * num_columns + tl.load(features.column + feature), [OUTPUT_ALIGNMENT])
    store_tile(out_ptr, offset, total, inside, DIM, BLOCK_D, first_column)


def histogram(
    *, out: Tensor, stamp: Tensor, weights: Tensor, hyperparameters: Tensor, seed_and_step: Tensor,
    iteration: Tensor | None, bags: Bags, check: BoundsCheck | None, report: Tensor | None, features: tuple[int, ...],
    config: HistogramConfig, shape: BatchShape, spec: OperatorSpec,
) -> Tensor:  # fmt: skip
    """Fill the columns of the given features in out [B, columns]; also writes the stamp, reports and repairs.

    Returns:
        [features, B, bins] uint8, the counts.
    """
    layout, device = spec.layout, weights.device
    on_device = layout.on_device(device)
    batch_size, num_entries = shape.batch_size, bags.indices.numel()
    bins = count_bins(spec, features)
    counts = torch.empty(len(features), batch_size, bins, dtype=torch.uint8, device=device)
    fatal = spec.bounds_check == "fatal" and check is not None
    launch(
        count_kernel,
        (len(features) * cdiv(batch_size, config.count_bags),),
        counts_ptr=counts,
        stamp_ptr=stamp,
        report_ptr=counting_report(report, spec),
        check=check,
        hyperparameters_ptr=hyperparameters,
        seed_and_step_ptr=seed_and_step,
        iteration_ptr=iteration,
        feature_list_ptr=layout.numbers_on_device(features, device),
        features=on_device.features,
        bags=bags,
        batch_size=batch_size,
        num_entries=num_entries,
        chunk=chunk_size(bags.offsets.numel()),
        IDS=config.ids,
        BINS=bins,
        BAGS=config.count_bags,
        NUM_HYPERPARAMETERS=hyperparameters.numel(),
        FATAL=fatal,
        debug=fatal,
        **launch_options(config.count_warps, config.count_registers),
    )
    if check is not None:
        bags = bags._replace(offsets=check.repaired)
    for bucket, chosen, numbers in counted_features(spec, features):
        columns = min(bucket.block_dim, config.pool_row_bytes // weights.element_size())
        blocks = len(chosen) * cdiv(batch_size, config.pool_bags)
        launch(
            pool_counts_kernel,
            (blocks, cdiv(bucket.dim, columns)),
            out_ptr=out,
            weights_ptr=weights,
            counts_ptr=counts,
            feature_list_ptr=layout.numbers_on_device(chosen, device),
            counts_number_ptr=layout.numbers_on_device(numbers, device),
            features=on_device.features,
            bags=bags,
            batch_size=batch_size,
            num_entries=num_entries,
            num_columns=layout.columns[-1],
            DIM=bucket.dim,
            BLOCK_D=columns,
            BINS=bins,
            BLOCK_BINS=min(bins, BLOCK_BINS),
            BAGS=config.pool_bags,
            IDS=config.ids,
            MEAN=spec.mean,
            TABLE_ALIGNMENT=layout.table_alignment,
            OUTPUT_ALIGNMENT=bucket.column_alignment,
            **launch_options(config.pool_warps, config.pool_registers if bins <= BLOCK_BINS else None),
        )
    return counts
