"""Bounds check: count bad ids and offsets, remember the first bad id, repair the offsets.

Ids are repaired where they are loaded (`fbtriton.rows.load_ids`), so nothing of the caller's is written and no copy
of the ids is made. Offsets are repaired into a new tensor that the forward uses and the backward keeps:

    repaired[0] = 0;   repaired[i] = max(repaired[i - 1], min(max(offsets[i], 0), N))

so bags never overlap, and entries past the last offset are padding that belongs to no bag.

The report is one int64 device tensor: [bad ids, bad offsets, feature, sample, id of the first bad id, 1 if there was
one]. Counts add up over calls until the user clears them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.config import EntryConfig, fixed_grid, select_entry, target_of
from fbtriton.layout import Bags, OperatorSpec
from fbtriton.rows import bag_feature, upper_bound

MODES = ("off", "ignore", "warning", "fatal")
REPORT_SIZE = 6


@dataclass(frozen=True)
class BoundsReport:
    """What the bounds check has found since the report was last cleared.

    Attributes:
        bad_ids: ids outside [0, rows) other than -1; each was read as, and trains, row 0.
        bad_offsets: offsets that were out of range, decreasing, or, for the first, not 0.
        first_bad_id: (feature, sample, id) of the first bad id, None if there was none.
    """

    bad_ids: int
    bad_offsets: int
    first_bad_id: tuple[int, int, int] | None

    def __str__(self) -> str:
        if not (self.bad_ids or self.bad_offsets):
            return "no id or offset was out of bounds"
        text = (
            f"{self.bad_ids} ids were out of bounds (each was read as row 0); {self.bad_offsets} offsets were repaired"
        )
        if self.first_bad_id is not None:
            feature, sample, bad_id = self.first_bad_id
            text += f"; first bad id: feature {feature}, sample {sample}, id {bad_id}"
        return text


def read_report(report: Tensor) -> BoundsReport:
    """Copies the report to the host, so it waits for the device."""
    bad_ids, bad_offsets, feature, sample, bad_id, found = report.tolist()
    return BoundsReport(bad_ids, bad_offsets, (feature, sample, bad_id) if found else None)


@triton.jit(do_not_specialize=["num_offsets", "num_entries"])
def check_offsets_kernel(
    repaired_ptr, bad_ptr, offsets_ptr, num_offsets, num_entries, BLOCK: tl.constexpr, FATAL: tl.constexpr
):
    """Copy the offsets, each kept in [0, N], and count the bad ones into bad_ptr[0]."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    live = position < num_offsets
    offset = tl.load(offsets_ptr + position, mask=live, other=0)
    previous = tl.load(offsets_ptr + position - 1, mask=live & (position > 0), other=0)
    bad = live & ((offset < previous) | (offset < 0) | (offset > num_entries) | ((position == 0) & (offset != 0)))
    if FATAL:
        tl.device_assert(~bad, "offsets must start at 0, not decrease and stay within the indices")
    count = tl.sum(bad.to(tl.int64))
    if count > 0:
        tl.atomic_add(bad_ptr, count, sem="relaxed")
    offset = tl.minimum(tl.maximum(offset, 0), num_entries)
    tl.store(repaired_ptr + position, tl.where(position == 0, 0, offset).to(offsets_ptr.dtype.element_ty), mask=live)


@triton.jit
def running_maximum(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["num_offsets", "num_entries"])
def repair_offsets_kernel(
    repaired_ptr, report_ptr, bad_ptr, offsets_ptr, num_offsets, num_entries, BLOCK: tl.constexpr
):
    """One program; does nothing unless an offset is bad. Then: the running maximum, and the exact count of repairs."""
    if tl.load(bad_ptr) > 0:
        highest = tl.zeros([1], tl.int64)
        repairs = tl.zeros([1], tl.int64)
        for start in range(0, num_offsets, BLOCK):
            position = start + tl.arange(0, BLOCK)
            live = position < num_offsets
            offset = tl.load(repaired_ptr + position, mask=live, other=0).to(tl.int64)
            given = tl.load(offsets_ptr + position, mask=live, other=0).to(tl.int64)
            offset = tl.maximum(tl.associative_scan(offset, 0, running_maximum), highest)
            tl.store(repaired_ptr + position, offset.to(offsets_ptr.dtype.element_ty), mask=live)
            highest = tl.maximum(highest, tl.max(offset, axis=0, keep_dims=True))
            repairs += tl.sum((live & (offset != given)).to(tl.int64), axis=0, keep_dims=True)
        if report_ptr is not None:
            tl.store(report_ptr + 1, tl.load(report_ptr + 1) + tl.sum(repairs))


@triton.jit
def first_bag_of(vbe, feature, batch_size):
    """The first bag of a feature."""
    if vbe is None:
        bag = feature * batch_size
    else:
        bag = tl.load(vbe.first_bags + feature)
    return bag


@triton.jit(do_not_specialize=["batch_size"])
def check_ids_kernel(
    report_ptr, first_bad_ptr, indices_ptr, offsets_ptr, vbe, features, batch_size,
    BLOCK: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    """Programs (k, feature) walk the entries of one feature, which lie together, block by block."""
    feature = tl.program_id(1).to(tl.int64)
    begin = tl.load(offsets_ptr + first_bag_of(vbe, feature, batch_size)).to(tl.int64)
    end = tl.load(offsets_ptr + first_bag_of(vbe, feature + 1, batch_size)).to(tl.int64)
    table_rows = tl.load(features.rows + feature)
    count = tl.zeros([BLOCK], tl.int64)
    nowhere = tl.full([BLOCK], 1 << 62, tl.int64)
    first = nowhere
    for start in range(begin + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        position = start + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
        row = tl.load(indices_ptr + position, mask=position < end, other=-1).to(tl.int64)
        bad = (row != -1) & ((row < 0) | (row >= table_rows))
        if FATAL:
            tl.device_assert(~bad, "an id is outside its table")
        count += bad.to(tl.int64)
        first = tl.minimum(first, tl.where(bad, position, nowhere))
    total = tl.sum(count)
    if total > 0:
        tl.atomic_add(report_ptr, total, sem="relaxed")
        tl.atomic_min(first_bad_ptr, tl.min(first), sem="relaxed")


@triton.jit(do_not_specialize=["batch_size", "num_bags", "num_entries"])
def report_first_kernel(report_ptr, first_bad_ptr, indices_ptr, bags, batch_size, num_bags, num_entries):
    """One program: turn the position of the first bad id into feature, sample and id, if none is reported yet."""
    position = tl.load(first_bad_ptr)
    if position < num_entries:
        if tl.load(report_ptr + 5) == 0:
            bag = upper_bound(bags.offsets, num_bags + 1, position + tl.zeros([1], tl.int64)) - 1
            bag = tl.sum(bag).to(tl.int64)
            feature = bag_feature(bags, bag, batch_size)
            tl.store(report_ptr + 2, feature)
            tl.store(report_ptr + 3, bag - first_bag_of(bags.vbe, feature, batch_size))
            tl.store(report_ptr + 4, tl.load(indices_ptr + position).to(tl.int64))
            tl.store(report_ptr + 5, 1)


def bounds_check(*, bags: Bags, report: Tensor, shape: BatchShape, spec: OperatorSpec) -> Tensor:
    """Launch the check; returns the repaired offsets. Writes the report in mode "warning"."""
    config = select_entry()
    indices, offsets = bags.indices, bags.offsets
    repaired = torch.empty_like(offsets)
    fatal = spec.bounds_check == "fatal"
    count = spec.bounds_check in ("warning", "fatal")
    bad_offsets = torch.zeros(1, dtype=torch.int64, device=offsets.device)
    num_offsets, num_entries = offsets.numel(), indices.numel()
    check_offsets_kernel[(triton.cdiv(num_offsets, config.block),)](
        repaired_ptr=repaired,
        bad_ptr=bad_offsets,
        offsets_ptr=offsets,
        num_offsets=num_offsets,
        num_entries=num_entries,
        BLOCK=config.block,
        FATAL=fatal,
        debug=fatal,
    )
    repair_offsets_kernel[(1,)](
        repaired_ptr=repaired,
        report_ptr=report if count else None,
        bad_ptr=bad_offsets,
        offsets_ptr=offsets,
        num_offsets=num_offsets,
        num_entries=num_entries,
        BLOCK=config.block,
    )
    if count and shape.num_bags and num_entries:
        _check_ids(bags._replace(offsets=repaired), report, shape, spec, config)
    return repaired


def _check_ids(bags: Bags, report: Tensor, shape: BatchShape, spec: OperatorSpec, config: EntryConfig) -> None:
    indices = bags.indices
    num_features = len(spec.feature_tables)
    num_entries = indices.numel()
    fatal = spec.bounds_check == "fatal"
    first_bad = torch.full((1,), torch.iinfo(torch.int64).max, dtype=torch.int64, device=indices.device)
    blocks = triton.cdiv(num_entries, config.block)
    (programs,) = fixed_grid(target_of(indices.device), config.programs_per_multiprocessor, blocks)
    check_ids_kernel[(max(1, programs // num_features), num_features)](
        report_ptr=report,
        first_bad_ptr=first_bad,
        indices_ptr=indices,
        offsets_ptr=bags.offsets,
        vbe=bags.vbe,
        features=spec.layout.on_device(indices.device).features,
        batch_size=shape.batch_size,
        BLOCK=config.block,
        FATAL=fatal,
        debug=fatal,
    )
    report_first_kernel[(1,)](
        report_ptr=report,
        first_bad_ptr=first_bad,
        indices_ptr=indices,
        bags=bags,
        batch_size=shape.batch_size,
        num_bags=shape.num_bags,
        num_entries=num_entries,
    )
