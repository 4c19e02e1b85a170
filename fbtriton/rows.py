"""Device functions on rows, shared by every kernel."""

from __future__ import annotations

from fbtriton._triton import tl, triton
from fbtriton.rounding import round_stochastically, rounding_noise

# Layout of the stamp, an int64 tensor that the forward writes and the backward reads:
# [step, seed, fp32 bits of hyperparameter 0, fp32 bits of hyperparameter 1, ...]
# and, where iterations are counted, the fp32 bits of 1 - beta^iteration for beta = hyperparameters 1 and 2.
STAMP_STEP = tl.constexpr(0)
STAMP_SEED = tl.constexpr(1)
STAMP_HYPERPARAMETERS = tl.constexpr(2)


@triton.jit
def power(base, exponent):
    """base fp64, exponent int64 >= 0, scalars. By squaring, so that it is right to fp64 on every GPU."""
    result = tl.full([], 1.0, tl.float64)
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base *= base
        exponent = exponent // 2
    return result


@triton.jit
def write_bias_corrections(stamp_ptr, hyperparameters_ptr, iteration_ptr, NUM_HYPERPARAMETERS: tl.constexpr):
    """Counts the iteration too."""
    iteration = tl.load(iteration_ptr) + 1
    tl.store(iteration_ptr, iteration)
    for i in tl.static_range(2):
        beta = tl.load(hyperparameters_ptr + 1 + i).to(tl.float64)
        bits = (1.0 - power(beta, iteration)).to(tl.float32).to(tl.int32, bitcast=True)
        tl.store(stamp_ptr + STAMP_HYPERPARAMETERS + NUM_HYPERPARAMETERS + i, bits.to(tl.int64))


@triton.jit
def write_stamp(stamp_ptr, hyperparameters_ptr, seed_and_step_ptr, iteration_ptr, NUM_HYPERPARAMETERS: tl.constexpr):
    """The first program of the launch writes it; stamp_ptr None = another launch does."""
    if stamp_ptr is not None:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(stamp_ptr + STAMP_SEED, tl.load(seed_and_step_ptr))
            tl.store(stamp_ptr + STAMP_STEP, tl.load(seed_and_step_ptr + 1))
            for i in tl.static_range(NUM_HYPERPARAMETERS):
                bits = tl.load(hyperparameters_ptr + i).to(tl.int32, bitcast=True)
                tl.store(stamp_ptr + STAMP_HYPERPARAMETERS + i, bits.to(tl.int64))
            if iteration_ptr is not None:
                write_bias_corrections(stamp_ptr, hyperparameters_ptr, iteration_ptr, NUM_HYPERPARAMETERS)


@triton.jit
def hyperparameter(stamp_ptr, NUMBER: tl.constexpr):
    return tl.load(stamp_ptr + STAMP_HYPERPARAMETERS + NUMBER).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def upper_bound(sorted_ptr, size, value):
    """How many of the ascending numbers sorted_ptr[:size] are <= value. value [K] -> [K] int32"""
    low = tl.zeros(value.shape, tl.int32)
    high = low + size
    step = size
    while step > 0:
        middle = low + (high - low) // 2  # the sum could pass 2^31
        searching = low < high
        at_most = tl.load(sorted_ptr + middle, mask=searching, other=0) <= value
        low = tl.where(searching & at_most, middle + 1, low)
        high = tl.where(searching & ~at_most, middle, high)
        step = step // 2
    return low


@triton.jit
def count_at_most(sorted_ptr, size, value, WAYS: tl.constexpr, LEVELS: tl.constexpr):
    """`upper_bound` of one number by the whole program: WAYS probes at once, WAYS**LEVELS >= size. -> int32 scalar

    Example, WAYS 2, value 4 in 0 1 1 3 4 4 7 9: probes 3 and 9 lead to the second half, 4 and 9 to its second half,
    and as 7 and 9 are too large the answer is 6.
    """
    section = tl.arange(0, WAYS) + 1
    low = tl.zeros([1], tl.int32)
    length = low + size
    for _ in tl.static_range(LEVELS):
        step = (length + WAYS - 1) // WAYS
        probe = low + section * step - 1  # [WAYS] the last number of each section
        inside = probe < size
        passed = inside & (tl.load(sorted_ptr + probe, mask=inside, other=0) <= value)
        low += tl.sum(passed.to(tl.int32)) * step
        length = step
    return tl.sum(low)


@triton.jit
def bag_bounds(offsets_ptr, bag, num_entries):
    """First entry and length of a bag, kept inside the indices even where the offsets were not checked."""
    begin = tl.load(offsets_ptr + bag).to(tl.int64)
    end = tl.load(offsets_ptr + bag + 1).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), num_entries)
    end = tl.minimum(tl.maximum(end, begin), num_entries)
    return begin, (end - begin).to(tl.int32)


@triton.jit
def bag_feature(bags, bag, batch_size):
    """The feature of each bag. bag any shape, int64"""
    if bags.vbe is None:
        feature = bag // batch_size
    else:
        feature = tl.load(bags.vbe.bag_features + bag).to(tl.int64)
    return feature


@triton.jit
def output_offset(bags, features, bag, feature, batch_size, row_stride):
    """The bag's first element in the output or its gradient. bag, feature any shape, int64"""
    if bags.vbe is None:
        offset = (bag - feature * batch_size) * row_stride + tl.load(features.column + feature)
    else:
        offset = tl.load(bags.vbe.output_offsets + bag)
    return offset


@triton.jit
def bucket_bag(bags, bucket_features_ptr, number, first_number, batch_size):
    """The bag and feature of the bucket's bag number `number`; first_number counts the bags of earlier buckets."""
    if bags.vbe is None:
        feature = tl.load(bucket_features_ptr + number // batch_size)
        bag = feature * batch_size + number % batch_size
    else:
        bag = tl.load(bags.vbe.bucket_bags + first_number + number).to(tl.int64)
        feature = tl.load(bags.vbe.bag_features + bag).to(tl.int64)
    return bag, feature


@triton.jit
def first_bag_of(vbe, feature, batch_size):
    """The first bag of a feature. feature any shape, int64"""
    if vbe is None:
        bag = feature * batch_size
    else:
        bag = tl.load(vbe.first_bags + feature)
    return bag


@triton.jit
def is_row(ids, table_rows):
    """Whether ids, of any shape, are in [0, table_rows): one unsigned comparison finds negative and large ones."""
    if ids.dtype == tl.int32:
        valid = ids.to(tl.uint32, bitcast=True) < tl.minimum(table_rows, 1 << 31).to(tl.uint32)
    else:
        valid = ids.to(tl.uint64, bitcast=True) < table_rows.to(tl.uint64, bitcast=True)
    return valid


@triton.jit
def is_bad_id(ids, table_rows):
    return ~is_row(ids, table_rows) & (ids != -1)


@triton.jit
def repair_and_check_ids(ids, table_rows):
    """`repair_ids` with rows of the dtype of the ids, and whether each id is out of range. Any shape."""
    valid = is_row(ids, table_rows)
    takes_part = (ids != -1) & (table_rows > 0)
    return tl.where(valid, ids, 0), takes_part, ~valid & (ids != -1)


@triton.jit
def load_checked_ids(indices_ptr, position, live, table_rows):
    """`load_ids` with rows of the dtype of the indices, and whether each id is out of range. Any shape."""
    return repair_and_check_ids(tl.load(indices_ptr + position, mask=live, other=-1), table_rows)


@triton.jit
def load_ids(indices_ptr, position, live, table_rows):
    """The row of each entry and whether it takes part. position, live [K] -> row [K] int64, live [K]"""
    return repair_ids(tl.load(indices_ptr + position, mask=live, other=-1), table_rows)


@triton.jit
def repair_ids(ids, table_rows):
    """An id out of range means row 0; an id of -1 is pruned and takes no part. -> row int64, live"""
    row, live, bad = repair_and_check_ids(ids, table_rows)
    return row.to(tl.int64), live


@triton.jit
def tile_mask(live, DIM: tl.constexpr, BLOCK_D: tl.constexpr, first_column=0):
    """[R] -> [R, BLOCK_D]; no column is masked where blocks fill DIM, which keeps wide loads wide."""
    mask = live[:, None]
    if DIM % BLOCK_D != 0:
        mask = mask & (first_column + tl.arange(0, BLOCK_D) < DIM)[None, :]
    return mask


@triton.jit
def tile_pointer(base_ptr, offset, BLOCK_D: tl.constexpr, first_column=0):
    """offset [R] -> [R, BLOCK_D]"""
    return base_ptr + offset[:, None] + (first_column + tl.arange(0, BLOCK_D))[None, :]


@triton.jit
def load_tile(base_ptr, offset, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr, first_column=0):
    """Columns of the rows of DIM elements at each offset. offset, live [R] -> [R, BLOCK_D] fp32, 0 where masked"""
    pointer = tile_pointer(base_ptr, offset, BLOCK_D, first_column)
    return tl.load(pointer, mask=tile_mask(live, DIM, BLOCK_D, first_column), other=0.0).to(tl.float32)


@triton.jit
def store_tile(base_ptr, offset, value, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr, first_column=0):
    """The inverse of `load_tile`, rounding to the dtype behind base_ptr. offset, live [R]; value [R, BLOCK_D]"""
    pointer = tile_pointer(base_ptr, offset, BLOCK_D, first_column)
    mask = tile_mask(live, DIM, BLOCK_D, first_column)
    tl.store(pointer, value.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mean_factor(length):
    """What a bag's sum is multiplied by for its mean. length any shape"""
    return 1.0 / tl.maximum(length, 1).to(tl.float32)


@triton.jit
def program_block(batch_size, BAGS: tl.constexpr):
    """Where programs take BAGS samples of one feature each: this one's number in the list of features, and its first
    sample. int32"""
    blocks = tl.cdiv(batch_size, BAGS)
    return tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BAGS


@triton.jit
def store_rows(
    weights_ptr, weight_offset, value, state_row, stamp_ptr, live,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Round and store updated rows. weight_offset, state_row, live [R]; value [R, BLOCK_D] fp32

    fp32 rows are stored as they are, whatever STOCHASTIC says.
    """
    DTYPE: tl.constexpr = weights_ptr.dtype.element_ty
    if STOCHASTIC and DTYPE != tl.float32:
        seed = tl.load(stamp_ptr + STAMP_SEED)
        step = tl.load(stamp_ptr + STAMP_STEP)
        value = round_stochastically(value, rounding_noise(seed, step, state_row, BLOCK_D), DTYPE)
    store_tile(weights_ptr, weight_offset, value, live, DIM, BLOCK_D)
