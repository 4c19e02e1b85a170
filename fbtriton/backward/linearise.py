"""The key and the payload of every entry: a block of neighbouring entries a program, whatever bags they are in.

Example, bags of 3, 0 and 2 entries, then 1 entry of padding:

    offsets         0 3 3 5
    bag of entry    0 0 0 2 2 3       how many offsets are <= its position, less one; 3 = no bag

The key is the row's number in bucket-major order (`TableLayout.key_bases`); entries that train nothing get the
largest, and so does the padding that fills the last block. Most blocks lie in one feature, and then everything about
it is loaded once.
"""

from __future__ import annotations

import math

from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.entries import EntryForm, store_entry
from fbtriton.batch import BatchShape
from fbtriton.config import planned, select_linearise
from fbtriton.launch import Constants, cdiv, launch, launch_options
from fbtriton.layout import Bags, Entries
from fbtriton.rows import bag_bounds, bag_feature, count_at_most, mean_factor, output_offset, repair_ids, upper_bound
from fbtriton.spec import OperatorSpec

FOR_FACTORS = 16  # registers more than the configuration says


@triton.jit
def write_entries(
    keys_ptr, entries, features, bags, bag, feature, position, ids, live, batch_size, num_entries, no_key, grad_stride,
    MEAN: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """bag (int64), position, ids, live [K]; feature a scalar or [K]. Entries that are not live belong to no bag."""
    row, trains = repair_ids(ids, tl.load(features.rows + feature))
    key_base = tl.load(features.key_base + feature)
    key = tl.where(trains & live & (key_base >= 0), key_base + row, no_key)
    tl.store(keys_ptr + position, key.to(keys_ptr.dtype.element_ty))
    scale = tl.full(position.shape, 1.0, tl.float32)
    if bags.sample_weights is not None:
        scale = tl.load(bags.sample_weights + position, mask=live, other=0.0)
    if MEAN:
        _, length = bag_bounds(bags.offsets, bag, num_entries)
        scale *= mean_factor(length)
    grad_offset = output_offset(bags, features, bag, feature, batch_size, grad_stride)
    store_entry(entries, position, grad_offset, scale, SCALED, UNIT)


@triton.jit(do_not_specialize=["batch_size", "num_bags", "num_entries", "no_key", "grad_stride"])
def linearise_kernel(
    keys_ptr, entries, features, bags, batch_size, num_bags, num_entries, no_key, grad_stride,
    BLOCK: tl.constexpr, WAYS: tl.constexpr, LEVELS: tl.constexpr,
    MEAN: tl.constexpr, SCALED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BLOCK
    position = start + tl.arange(0, BLOCK)  # [BLOCK]
    first = count_at_most(bags.offsets, num_bags + 1, start, WAYS, LEVELS) - 1
    last = count_at_most(bags.offsets, num_bags + 1, start + BLOCK - 1, WAYS, LEVELS) - 1
    bag = first + upper_bound(bags.offsets + first + 1, tl.maximum(last - first, 0), position)
    live = (position < num_entries) & (bag >= 0) & (bag < num_bags)
    bag = tl.minimum(tl.maximum(bag, 0), num_bags - 1).to(tl.int64)
    if start + BLOCK <= num_entries:  # without a mask, ids are loaded 16 bytes a lane
        ids = tl.load(bags.indices + position)
    else:
        ids = tl.load(bags.indices + position, mask=position < num_entries, other=-1)
    feature = bag_feature(bags, tl.minimum(tl.maximum(first, 0), num_bags - 1).to(tl.int64), batch_size)
    last_feature = bag_feature(bags, tl.minimum(tl.maximum(last, 0), num_bags - 1).to(tl.int64), batch_size)
    if feature == last_feature:
        write_entries(
            keys_ptr, entries, features, bags, bag, feature, position, ids, live, batch_size, num_entries, no_key,
            grad_stride, MEAN, SCALED, UNIT,
        )  # fmt: skip
    else:
        write_entries(
            keys_ptr, entries, features, bags, bag, bag_feature(bags, bag, batch_size), position, ids, live,
            batch_size, num_entries, no_key, grad_stride, MEAN, SCALED, UNIT,
        )  # fmt: skip


def entry_form(bags: Bags, grad_alignments: tuple[int, ...], spec: OperatorSpec) -> EntryForm:
    return EntryForm(scaled=spec.mean or bags.sample_weights is not None, unit=math.gcd(*grad_alignments))


@planned
def plan_linearise(mean: bool, form: EntryForm, levels: int) -> Constants:
    config = select_linearise()
    return Constants(
        BLOCK=config.block,
        WAYS=config.ways,
        LEVELS=levels,
        MEAN=mean,
        SCALED=form.scaled,
        UNIT=form.unit,
        **launch_options(config.num_warps, config.registers and config.registers + FOR_FACTORS * form.scaled),
    )


def linearise(
    *, bags: Bags, shape: BatchShape, grad_output: Tensor, form: EntryForm, spec: OperatorSpec,
    left_out: tuple[int, ...] = (),
) -> tuple[Tensor, Entries]:  # fmt: skip
    """Keys and what goes with them, in the order of the batch, in whole blocks that end with padding. The entries of
    the features in left_out train nothing here."""
    layout = spec.layout
    config = select_linearise()
    num_entries, num_bags = bags.indices.numel(), bags.offsets.numel() - 1
    blocks = num_entries // config.block + 1  # at least one slot of padding: every run ends where another key begins
    last_offset = shape.output_shape[0] * grad_output.stride(0) + layout.columns[-1]
    keys = bags.indices.new_empty(blocks * config.block, dtype=layout.key_dtype)
    entries = form.empty(keys.numel(), last_offset, config.offset_bits, keys.device)
    launch(
        linearise_kernel,
        (blocks,),
        plan_linearise(spec.mean, form, cdiv(num_bags.bit_length(), config.ways.bit_length() - 1)),
        keys_ptr=keys,
        entries=entries,
        features=layout.sorted_features(left_out, keys.device),
        bags=bags,
        batch_size=shape.batch_size,
        num_bags=num_bags,
        num_entries=num_entries,
        no_key=layout.no_key,
        grad_stride=grad_output.stride(0),
    )
    return keys, entries
