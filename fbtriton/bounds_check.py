"""Bounds check: count bad ids and offsets, remember the first bad id, repair the offsets.

Ids are repaired where they are loaded (`fbtriton.rows.repair_and_check_ids`), so nothing of the caller's is written and
no copy of the ids is made. Offsets are repaired into a new tensor that the forward uses and the backward keeps:

    repaired[0] = 0;   repaired[i] = max(repaired[i - 1], min(max(offsets[i], 0), N))

so bags never overlap, and entries past the last offset are padding that belongs to no bag.

The offsets are looked at first, in one launch of at most CHUNKS programs, one for each chunk of neighbouring offsets.
Then either a separate check repairs them and looks at the ids, or the forward does both while it gathers (fused): a bad
id shows in the sum that it makes anyway, and offsets are repaired only if a chunk was bad.

The report is one int64 device tensor: [bad ids, bad offsets, feature, sample, low and high half of the first bad id,
1 if an offset was bad]. The four words of the first bad id are 0 without one; each holds 2^31 - 1 - (position of the
id) above 32 bits of its value, so that an atomic maximum keeps what belongs to the first. Everything adds up over
calls until the user clears it, and a later call does not replace an earlier one's first id. The last word spares the
forward a look at the chunks as long as no offset has been bad.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.batch import BatchShape
from fbtriton.config import INTERPRET, EntryConfig, select_entry, target_of
from fbtriton.launch import Constants, cdiv, fixed_grid, launch
from fbtriton.layout import Bags, BoundsCheck
from fbtriton.rows import first_bag_of, is_bad_id, upper_bound
from fbtriton.spec import OperatorSpec

MODES = ("off", "ignore", "warning", "fatal")
REPORT_SIZE = 7
LAST_POSITION = 2**31 - 1
CHUNKS = 4 if INTERPRET else 512  # a power of two, some for every multiprocessor
CHUNK_WORDS = -(-CHUNKS // 8)  # of a byte for each chunk
CHUNK_COUNT = tl.constexpr(CHUNKS)
CHUNK_BLOCK = 512  # offsets of one step, two for each lane: wider ones wait longer for their unaligned neighbours
CHUNK_WARPS = 8
LEAST_CHUNK = 16 if INTERPRET else 256  # offsets


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
    bad_ids, bad_offsets, *words, _ = report.tolist()
    feature, sample, low, high = (word & 0xFFFFFFFF for word in words)
    bad_id = (high << 32 | low) - (high >> 31 << 64)
    return BoundsReport(bad_ids, bad_offsets, (feature, sample, bad_id) if words[0] else None)


def first_bad_words(position: int, feature: int, sample: int, bad_id: int) -> list[int]:
    """The four words of a report about its first bad id."""
    order = (LAST_POSITION - position) << 32
    return [order | value & 0xFFFFFFFF for value in (feature, sample, bad_id, bad_id >> 32)]


@triton.jit
def keep_first(word_ptr, order, bad, value):
    """Keep the value of the first bad entry: the one with the largest order. All of one shape, int64"""
    word = tl.where(bad, order | (value & 0xFFFFFFFF), 0)
    tl.atomic_max(word_ptr, tl.max(word), sem="relaxed")


@triton.jit
def report_bad_ids(report_ptr, check, bad, position, feature, sample, row):
    """Count the bad ids; keep the first unless an earlier call has left one. All [K]; position, row int64"""
    count = tl.sum(bad.to(tl.int64))
    if count > 0:
        tl.atomic_add(report_ptr, count, sem="relaxed")
        if tl.load(check.sealed) == 0:
            order = (2147483647 - position) << 32
            keep_first(report_ptr + 2, order, bad, feature.to(tl.int64))
            keep_first(report_ptr + 3, order, bad, sample.to(tl.int64))
            keep_first(report_ptr + 4, order, bad, row)
            keep_first(report_ptr + 5, order, bad, row >> 32)


@triton.jit(do_not_specialize=["num_offsets", "num_entries", "chunk"])
def check_offsets_kernel(
    check, report_ptr, offsets_ptr, num_offsets, num_entries, chunk,
    BLOCK: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    """One program looks at one chunk: copies its offsets, each kept in [0, N], and says whether one is bad."""
    program = tl.program_id(0)
    first = tl.multiple_of(program.to(tl.int64) * chunk, 16)
    end = tl.minimum(first + chunk, num_offsets)
    any_bad = tl.zeros([BLOCK], tl.int1)
    highest = tl.zeros([BLOCK], tl.int64)
    for start in range(first, end, BLOCK):
        position = tl.multiple_of(start, 16) + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
        live = position < end
        offset = tl.load(offsets_ptr + position, mask=live, other=0)
        previous = tl.load(offsets_ptr + position - 1, mask=live & (position > 0), other=0)
        bad = live & ((offset < previous) | (offset < 0) | (offset > num_entries) | ((position == 0) & (offset != 0)))
        if FATAL:
            tl.device_assert(~bad, "offsets must start at 0, not decrease and stay within the indices")
        any_bad |= bad
        offset = tl.minimum(tl.maximum(offset, 0), num_entries)
        offset = tl.where(position == 0, 0, offset)
        highest = tl.maximum(highest, offset.to(tl.int64))
        tl.store(check.repaired + position, offset.to(offsets_ptr.dtype.element_ty), mask=live)
    is_bad = tl.max(any_bad.to(tl.int32))
    tl.store(check.bad + program, is_bad.to(tl.int8))
    if is_bad > 0:
        tl.atomic_max(check.ever_bad, 1, sem="relaxed")
    tl.store(check.highest + program, tl.max(highest))
    if program == 0:  # chunks without a program are not bad
        number = tl.arange(0, CHUNK_COUNT)
        tl.store(check.bad + number, tl.zeros([CHUNK_COUNT], tl.int8), mask=number >= tl.num_programs(0))
    if report_ptr is not None:
        if program == 0:
            tl.store(check.sealed, tl.load(report_ptr + 2))
            if tl.load(offsets_ptr) != 0:
                tl.atomic_add(report_ptr + 1, 1, sem="relaxed")


@triton.jit
def any_bad_offset(check):
    """Of this call."""
    return tl.max(tl.load(check.bad + tl.arange(0, CHUNK_COUNT)).to(tl.int32)) > 0


@triton.jit
def has_bad_offset(check, ever_bad):
    """`any_bad_offset`, looked up only if an offset was ever bad."""
    bad_offset = ever_bad != 0
    if bad_offset:
        bad_offset = any_bad_offset(check)
    return bad_offset


@triton.jit
def repair_offset(offsets_ptr, check, number, num_entries, chunk):
    """The repaired offsets of the given numbers. Slow: it walks a chunk. number [K] int64 -> [K] int64"""
    own_chunk = number // chunk
    highest = tl.zeros_like(number)
    for other in range(tl.max(own_chunk)):
        highest = tl.where(other < own_chunk, tl.maximum(highest, tl.load(check.highest + other)), highest)
    position = own_chunk * chunk
    for _ in range(chunk):
        inside = (position <= number) & (position > 0)
        offset = tl.load(offsets_ptr + position, mask=inside, other=0).to(tl.int64)
        highest = tl.maximum(highest, tl.minimum(offset, num_entries))
        position += 1
    return highest


@triton.jit
def repair_bags(check, report_ptr, offsets_ptr, bag, counted, num_entries, chunk):
    """Store the repaired offsets of the bags, and count the repairs; for batches in which an offset is bad.

    bag [K] int64, in which a bag may stand several times; counted [K] says where it counts. Both of a bag's offsets
    are stored, though the first is the neighbour's too, so that a program needs no other to read its own bags'.
    """
    begin = repair_offset(offsets_ptr, check, bag, num_entries, chunk)
    end = repair_offset(offsets_ptr, check, bag + 1, num_entries, chunk)
    tl.store(check.repaired + bag, begin.to(offsets_ptr.dtype.element_ty))
    tl.store(check.repaired + bag + 1, end.to(offsets_ptr.dtype.element_ty))
    if report_ptr is not None:
        given = tl.load(offsets_ptr + bag + 1, mask=counted, other=0).to(tl.int64)
        tl.atomic_add(report_ptr + 1, tl.sum((counted & (given != end)).to(tl.int64)), sem="relaxed")
    tl.debug_barrier()  # other threads of the program read what was stored


@triton.jit
def report_ids_of_bags(
    check, report_ptr, indices_ptr, feature, table_rows, sample, begin, length, lane,
    LANES: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    """Go through the ids of some bags and report the bad ones. Slow, for bags that have one. A bag's ids go to LANES
    elements with lanes 0 to LANES - 1; feature to lane of one shape, the first two also scalar."""
    for step in range(0, tl.max(length), LANES):
        number = step + lane
        row = tl.load(indices_ptr + begin + number, mask=number < length, other=-1).to(tl.int64)
        bad = is_bad_id(row, table_rows)
        if FATAL:
            tl.device_assert(~bad, "an id is outside its table")
        report_bad_ids(report_ptr, check, bad, begin + number, feature + tl.zeros_like(row), sample, row)


@triton.jit
def running_maximum(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["num_offsets", "num_entries"])
def repair_offsets_kernel(check, report_ptr, offsets_ptr, num_offsets, num_entries, BLOCK: tl.constexpr):
    """One program; does nothing unless an offset is bad. Then: the running maximum, and the exact count of repairs."""
    if any_bad_offset(check):
        highest = tl.zeros([1], tl.int64)
        repairs = tl.zeros([1], tl.int64)
        for start in range(0, num_offsets, BLOCK):
            position = start + tl.arange(0, BLOCK)
            live = position < num_offsets
            offset = tl.load(check.repaired + position, mask=live, other=0).to(tl.int64)
            given = tl.load(offsets_ptr + position, mask=live, other=0).to(tl.int64)
            offset = tl.maximum(tl.associative_scan(offset, 0, running_maximum), highest)
            tl.store(check.repaired + position, offset.to(offsets_ptr.dtype.element_ty), mask=live)
            highest = tl.maximum(highest, tl.max(offset, axis=0, keep_dims=True))
            repairs += tl.sum((live & (offset != given) & (position > 0)).to(tl.int64), axis=0, keep_dims=True)
        if report_ptr is not None:
            tl.atomic_add(report_ptr + 1, tl.sum(repairs), sem="relaxed")


@triton.jit(do_not_specialize=["batch_size", "num_bags"])
def check_ids_kernel(check, report_ptr, bags, features, batch_size, num_bags, BLOCK: tl.constexpr, FATAL: tl.constexpr,
):  # fmt: skip
    """Programs (k, feature) walk the entries of one feature, which lie together, block by block."""
    feature = tl.program_id(1).to(tl.int64)
    first_bag = first_bag_of(bags.vbe, feature, batch_size)
    begin = tl.load(bags.offsets + first_bag).to(tl.int64)
    end = tl.load(bags.offsets + first_bag_of(bags.vbe, feature + 1, batch_size)).to(tl.int64)
    table_rows = tl.load(features.rows + feature)
    for start in range(begin + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        position = start + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
        row = tl.load(bags.indices + position, mask=position < end, other=-1).to(tl.int64)
        bad = is_bad_id(row, table_rows)
        if FATAL:
            tl.device_assert(~bad, "an id is outside its table")
        if tl.max(bad.to(tl.int32)) > 0:
            sample = upper_bound(bags.offsets, num_bags + 1, position) - 1 - first_bag
            report_bad_ids(report_ptr, check, bad, position, feature + tl.zeros_like(position), sample, row)


def counting_report(report: Tensor | None, spec: OperatorSpec) -> Tensor | None:
    """The report, if the mode counts what is bad."""
    return report if spec.bounds_check in ("warning", "fatal") else None


def chunk_size(num_offsets: int) -> int:
    """Offsets in a chunk: a multiple of 16, so that chunks start where wide loads may; few offsets make few chunks."""
    return max(LEAST_CHUNK, cdiv(cdiv(num_offsets, CHUNKS), 16) * 16)


CHECK_CONSTANTS = {
    fatal: Constants(BLOCK=CHUNK_BLOCK, FATAL=fatal, debug=fatal, num_warps=CHUNK_WARPS) for fatal in (False, True)
}


def check_offsets(*, bags: Bags, report: Tensor, spec: OperatorSpec) -> BoundsCheck:
    """One launch: the offsets, each kept in [0, N], and where they are bad. If none is, they are repaired."""
    offsets = bags.offsets
    repaired = torch.empty_like(offsets)
    scratch = torch.empty(CHUNKS + CHUNK_WORDS + 1, dtype=torch.int64, device=offsets.device)
    check = BoundsCheck(
        repaired=repaired,
        bad=scratch[CHUNKS:].view(torch.int8),
        highest=scratch,
        ever_bad=report[REPORT_SIZE - 1 :],
        sealed=scratch[CHUNKS + CHUNK_WORDS :],
    )
    chunk = chunk_size(offsets.numel())
    launch(
        check_offsets_kernel,
        (cdiv(offsets.numel(), chunk),),
        CHECK_CONSTANTS[spec.bounds_check == "fatal"],
        check=check,
        report_ptr=counting_report(report, spec),
        offsets_ptr=offsets,
        num_offsets=offsets.numel(),
        num_entries=bags.indices.numel(),
        chunk=chunk,
    )
    return check


def bounds_check(*, bags: Bags, report: Tensor, shape: BatchShape, spec: OperatorSpec) -> Tensor:
    """The separate check; returns the repaired offsets. Writes the report."""
    config = select_entry()
    check = check_offsets(bags=bags, report=report, spec=spec)
    num_entries = bags.indices.numel()
    counting = counting_report(report, spec)
    launch(
        repair_offsets_kernel,
        (1,),
        check=check,
        report_ptr=counting,
        offsets_ptr=bags.offsets,
        num_offsets=bags.offsets.numel(),
        num_entries=num_entries,
        BLOCK=config.block,
    )
    if counting is not None and shape.num_bags and num_entries:
        _check_ids(bags._replace(offsets=check.repaired), check, counting, shape, spec, config)
    return check.repaired


def _check_ids(
    bags: Bags, check: BoundsCheck, report: Tensor, shape: BatchShape, spec: OperatorSpec, config: EntryConfig
) -> None:
    device = bags.indices.device
    num_features = len(spec.feature_tables)
    fatal = spec.bounds_check == "fatal"
    blocks = cdiv(bags.indices.numel(), config.block)
    (programs,) = fixed_grid(target_of(device), config.programs_per_multiprocessor, blocks)
    launch(
        check_ids_kernel,
        (max(1, programs // num_features), num_features),
        check=check,
        report_ptr=report,
        bags=bags,
        features=spec.layout.on_device(device).features,
        batch_size=shape.batch_size,
        num_bags=shape.num_bags,
        BLOCK=config.block,
        FATAL=fatal,
        debug=fatal,
    )
