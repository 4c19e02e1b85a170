"""Group the entries of a batch by row: linearise, sort, find the runs.

The key of an entry is its row's number in bucket-major order (`TableLayout.key_bases`). The sort is stable, so the
entries of a run stay in the order of the batch and every later sum has one fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.config import fixed_grid, select_entry, target_of
from fbtriton.layout import Bags, OperatorSpec, SortedRuns
from fbtriton.rows import bag_bounds, bag_feature, load_ids, output_offset


@triton.jit(do_not_specialize=["batch_size", "num_bags", "num_entries", "no_key"])
def linearise_kernel(
    keys_ptr, entry_bags_ptr, features, bags, batch_size, num_bags, num_entries, no_key,
    BAGS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Key and bag of every entry that belongs to a bag: BAGS bags a program, ENTRIES of each at a time."""
    bag = tl.program_id(0).to(tl.int64) * BAGS + tl.arange(0, BAGS)  # [BAGS]
    live_bag = bag < num_bags
    bag = tl.where(live_bag, bag, 0)
    feature = bag_feature(bags, bag, batch_size)
    begin, length = bag_bounds(bags.offsets, bag, num_entries)
    length = tl.where(live_bag, length, 0)
    key_base = tl.load(features.key_base + feature)
    table_rows = tl.load(features.rows + feature)
    lane = tl.arange(0, ENTRIES)
    for step in range(0, tl.max(length), ENTRIES):
        position = begin[:, None] + step + lane[None, :]  # [BAGS, ENTRIES]
        inside = step + lane[None, :] < length[:, None]
        row, live = load_ids(bags.indices, position, inside, table_rows[:, None])
        key = tl.where(live, key_base[:, None] + row, no_key)
        tl.store(keys_ptr + position, key.to(keys_ptr.dtype.element_ty), mask=inside)
        tl.store(entry_bags_ptr + position, (bag[:, None] + tl.zeros_like(position)).to(tl.int32), mask=inside)


def linearise(*, bags: Bags, shape: BatchShape, spec: OperatorSpec) -> tuple[Tensor, Tensor]:
    """Keys [N] and bags [N] int32 of the entries; padding keeps the key that trains nothing."""
    layout = spec.layout
    config = select_entry()
    keys = torch.full_like(bags.indices, layout.no_key, dtype=layout.key_dtype)
    entry_bags = torch.empty_like(bags.indices, dtype=torch.int32)
    num_bags = bags.offsets.numel() - 1
    linearise_kernel[(triton.cdiv(num_bags, config.bags_per_program),)](
        keys_ptr=keys,
        entry_bags_ptr=entry_bags,
        features=layout.on_device(keys.device).features,
        bags=bags,
        batch_size=shape.batch_size,
        num_bags=num_bags,
        num_entries=keys.numel(),
        no_key=layout.no_key,
        BAGS=config.bags_per_program,
        ENTRIES=config.entries_per_bag,
        num_warps=config.num_warps,
    )
    return keys, entry_bags


def sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted keys and the entry that each came from. PyTorch's sort: always there, no host sync, stable."""
    return torch.sort(keys, stable=True)


@triton.jit(do_not_specialize=["batch_size", "num_entries", "no_key", "grad_stride"])
def write_runs_kernel(
    num_runs_ptr, runs,
    keys_ptr, order_ptr, run_counts_ptr, entry_bags_ptr, features, bags,
    batch_size, num_entries, no_key, grad_stride,
    BLOCK: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """For each sorted entry: its run if it starts one, where its gradient lies, and the factor of that gradient."""
    for start in range(tl.program_id(0) * BLOCK, num_entries, tl.num_programs(0) * BLOCK):
        slot = start + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
        live = slot < num_entries
        key = tl.load(keys_ptr + slot, mask=live, other=no_key)
        run = tl.load(run_counts_ptr + slot, mask=live, other=1) - 1
        is_first = live & ((slot == 0) | (tl.load(keys_ptr + slot - 1, mask=live & (slot > 0), other=0) != key))
        tl.store(runs.run_keys + run, key, mask=is_first)
        tl.store(runs.run_starts + run, slot.to(tl.int32), mask=is_first)
        is_last = slot == num_entries - 1
        tl.store(runs.run_starts + run + 1, (slot + 1).to(tl.int32), mask=is_last)
        tl.store(num_runs_ptr + tl.zeros_like(run), run + (key != no_key).to(tl.int32), mask=is_last)

        trains = live & (key != no_key)
        entry = tl.load(order_ptr + slot, mask=trains, other=0)
        bag = tl.load(entry_bags_ptr + entry, mask=trains, other=0).to(tl.int64)
        feature = bag_feature(bags, bag, batch_size)
        grad_offset = output_offset(bags, features, bag, feature, batch_size, grad_stride)
        tl.store(runs.grad_offsets + slot, grad_offset.to(runs.grad_offsets.dtype.element_ty), mask=live)
        if runs.entry_scales is not None:
            scale = tl.full([BLOCK], 1.0, tl.float32)
            if bags.sample_weights is not None:
                scale = tl.load(bags.sample_weights + entry, mask=trains, other=0.0)
            if MEAN:
                _, length = bag_bounds(bags.offsets, bag, num_entries)
                scale *= 1.0 / tl.maximum(length, 1).to(tl.float32)
            tl.store(runs.entry_scales + slot, scale, mask=live)


def find_runs(
    *, keys: Tensor, order: Tensor, entry_bags: Tensor, bags: Bags, shape: BatchShape, grad_output: Tensor,
    spec: OperatorSpec,
) -> SortedRuns:  # fmt: skip
    """Sorted keys -> runs, and for each sorted entry the place and factor of its gradient."""
    config = select_entry()
    num_entries = keys.numel()
    starts = torch.ones(num_entries, dtype=torch.int32, device=keys.device)
    starts[1:] = keys[1:] != keys[:-1]
    run_counts = torch.cumsum(starts, 0, dtype=torch.int32)
    last_offset = shape.output_shape[0] * grad_output.stride(0)
    offset_dtype = torch.int32 if last_offset <= torch.iinfo(torch.int32).max else torch.int64
    scaled = spec.mean or bags.sample_weights is not None
    runs = SortedRuns(
        num_runs=torch.empty(1, dtype=torch.int32, device=keys.device),
        run_keys=torch.empty_like(keys),
        run_starts=torch.empty(num_entries + 1, dtype=torch.int32, device=keys.device),
        grad_offsets=torch.empty(num_entries, dtype=offset_dtype, device=keys.device),
        entry_scales=torch.empty(num_entries, dtype=torch.float32, device=keys.device) if scaled else None,
    )
    blocks = triton.cdiv(num_entries, config.block)
    write_runs_kernel[fixed_grid(target_of(keys.device), config.programs_per_multiprocessor, blocks)](
        num_runs_ptr=runs.num_runs,
        runs=runs,
        keys_ptr=keys,
        order_ptr=order,
        run_counts_ptr=run_counts,
        entry_bags_ptr=entry_bags,
        features=spec.layout.on_device(keys.device).features,
        bags=bags,
        batch_size=shape.batch_size,
        num_entries=num_entries,
        no_key=spec.layout.no_key,
        grad_stride=grad_output.stride(0),
        BLOCK=config.block,
        MEAN=spec.mean,
        num_warps=config.num_warps,
    )
    return runs


def transpose(*, bags: Bags, shape: BatchShape, grad_output: Tensor, spec: OperatorSpec) -> SortedRuns:
    """Bags -> runs: every row of the batch once, with all its entries."""
    keys, entry_bags = linearise(bags=bags, shape=shape, spec=spec)
    keys, order = sort(keys)
    return find_runs(
        keys=keys,
        order=order,
        entry_bags=entry_bags,
        bags=bags,
        shape=shape,
        grad_output=grad_output,
        spec=spec,
    )
