"""Sorted keys -> runs, the rows they belong to, and which of them are long: two passes over the keys.

A program owns neighbouring blocks of keys, one key a lane: shared memory then carries nothing between wide loads
and scattered stores. The first pass counts what starts in them; in the second every program adds
the counts of the programs before it and so knows the number of its first run. What comes out does not depend on how
the blocks are dealt out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.workspace import carve
from fbtriton.config import LongRunConfig, Target, planned, select_runs, target_of
from fbtriton.launch import Constants, cdiv, fixed_grid, launch, launch_options
from fbtriton.layout import LongRuns, Runs, RunTables
from fbtriton.rows import upper_bound
from fbtriton.spec import OperatorSpec

# What is counted, in the order of RunTables.ranges and of the counts between the passes.
RUNS = tl.constexpr(0)
LONG_RUNS = tl.constexpr(1)
PIECES = tl.constexpr(2)
KINDS = tl.constexpr(3)
MOST_BLOCK = 512
BITS = tl.constexpr(MOST_BLOCK.bit_length())  # of the count of one kind in a block
FIELD = tl.constexpr((1 << MOST_BLOCK.bit_length()) - 1)


@triton.jit
def load_keys(keys_ptr, slot, num_slots, no_key, THRESHOLD: tl.constexpr, PIECE: tl.constexpr):
    """slot [K] -> key, the key before it (-1 before the first), whether a run starts, whether a long run starts,
    whether a piece of one does"""
    key = tl.load(keys_ptr + slot)
    previous = tl.load(keys_ptr + slot - 1, mask=slot > 0, other=-1)
    starts = (key != previous) & (key != no_key)
    inside = (slot % PIECE == 0) & (key == previous) & (key != no_key)
    ahead = slot + (THRESHOLD - 1)
    reaches = tl.load(keys_ptr + ahead, mask=(starts | inside) & (ahead < num_slots), other=-1) == key
    back = tl.load(keys_ptr + slot - THRESHOLD, mask=inside & (slot >= THRESHOLD), other=-1)
    is_long = starts & reaches
    return key, previous, starts, is_long, is_long | (inside & reaches & (back == key))


@triton.jit
def first_cut(start, THRESHOLD: tl.constexpr, PIECE: tl.constexpr):
    """Where the second piece would start of a long run that starts at start."""
    return (start + THRESHOLD + PIECE - 1) // PIECE * PIECE


@triton.jit
def count_pieces(start, end, THRESHOLD: tl.constexpr, PIECE: tl.constexpr):
    """Pieces of a long run of the sorted entries start to end - 1."""
    return 1 + tl.maximum(end - THRESHOLD - first_cut(start, THRESHOLD, PIECE) + PIECE, 0) // PIECE


@triton.jit
def piece_bounds(start, end, number, THRESHOLD: tl.constexpr, PIECE: tl.constexpr):
    """The sorted entries of a piece of the long run start to end - 1: its start, and its end."""
    cut = first_cut(start, THRESHOLD, PIECE) + number * PIECE
    return tl.where(number == 0, start, cut - PIECE), tl.where(cut + THRESHOLD <= end, cut, end)


@triton.jit(do_not_specialize=["num_slots", "slots_per_program", "no_key"])
def count_runs_kernel(
    counts_ptr, keys_ptr, num_slots, slots_per_program, no_key,
    BLOCK: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * slots_per_program
    num_runs = tl.zeros([BLOCK], tl.int32)  # for each lane
    num_long = tl.zeros([BLOCK], tl.int32)
    num_pieces = tl.zeros([BLOCK], tl.int32)
    for start in range(first, first + tl.minimum(slots_per_program, num_slots - first), BLOCK):
        slot = start + tl.arange(0, BLOCK)  # [BLOCK]
        _, _, starts, is_long, is_piece = load_keys(keys_ptr, slot, num_slots, no_key, THRESHOLD, PIECE)
        num_runs += starts.to(tl.int32)
        num_long += is_long.to(tl.int32)
        num_pieces += is_piece.to(tl.int32)
    count_ptr = counts_ptr + tl.program_id(0)
    tl.store(count_ptr + RUNS * tl.num_programs(0), tl.sum(num_runs))
    tl.store(count_ptr + LONG_RUNS * tl.num_programs(0), tl.sum(num_long))
    tl.store(count_ptr + PIECES * tl.num_programs(0), tl.sum(num_pieces))


@triton.jit
def counted_before(counts_ptr, KIND: tl.constexpr, PROGRAMS: tl.constexpr):
    """How many of a kind all programs before this one have."""
    program = tl.arange(0, PROGRAMS)
    counts = tl.load(counts_ptr + KIND * tl.num_programs(0) + program, mask=program < tl.program_id(0), other=0)
    return tl.sum(counts)


@triton.jit
def table_of(key_tables, num_tables, key):
    """[K] -> [K] int32"""
    return upper_bound(key_tables.key_base, num_tables, key) - 1


@triton.jit
def write_rows(runs, key_tables, table, key, run, starts):
    """Where the row of each run lies. key, run, starts [K]; table [K] or [1]"""
    offset_type: tl.constexpr = runs.weight_offsets.dtype.element_ty
    dim = tl.load(key_tables.dim + table).to(offset_type)
    shift = tl.load(key_tables.weight_shift + table).to(offset_type)
    product = tl.mul(key.to(offset_type), dim, sanitize_overflow=False)  # may pass the type's range; the sum comes back
    tl.store(runs.weight_offsets + run, tl.add(shift, product, sanitize_overflow=False), mask=starts)
    state_type: tl.constexpr = runs.state_rows.dtype.element_ty
    state_row = tl.load(key_tables.state_shift + table).to(state_type) + key.to(state_type)
    tl.store(runs.state_rows + run, state_row, mask=starts)


@triton.jit
def row_of_run(runs, run, live, ROW_ALIGNMENT: tl.constexpr, ROW_UNIT: tl.constexpr):
    """Where the row starts in the flat weights, and which row of row-wise state it is. run, live [R] -> [R] int64"""
    weight_offset = tl.load(runs.weight_offsets + run, mask=live, other=0).to(tl.int64)
    if ROW_UNIT > 1:  # a product by 1 would be removed, and what is said of its alignment with it
        weight_offset *= ROW_UNIT
    state_row = tl.load(runs.state_rows + run, mask=live, other=0).to(tl.int64)
    return tl.multiple_of(weight_offset, [ROW_ALIGNMENT]), state_row


@triton.jit(do_not_specialize=["num_slots", "slots_per_program", "no_key", "num_tables", "num_bounds"])
def write_runs_kernel(
    runs, long_runs, ranges_ptr, seed_and_step_ptr,
    counts_ptr, keys_ptr, key_tables, bucket_keys_ptr,
    num_slots, slots_per_program, no_key, num_tables, num_bounds,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, THRESHOLD: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Also advances the step of stochastic rounding: the stamp holds the step that this backward uses."""
    if tl.program_id(0) == 0:
        tl.store(seed_and_step_ptr + 1, tl.load(seed_and_step_ptr + 1) + 1)
    first_run = counted_before(counts_ptr, RUNS, PROGRAMS)
    first_long = counted_before(counts_ptr, LONG_RUNS, PROGRAMS)
    first_piece = counted_before(counts_ptr, PIECES, PROGRAMS)
    table = tl.full([1], 0, tl.int32)  # of the last key so far
    next_key = tl.full([1], -1, tl.int64)  # the first key behind that table
    first = tl.program_id(0) * slots_per_program
    for start in range(first, first + tl.minimum(slots_per_program, num_slots - first), BLOCK):
        slot = start + tl.arange(0, BLOCK)  # [BLOCK]
        key, previous, starts, is_long, is_piece = load_keys(keys_ptr, slot, num_slots, no_key, THRESHOLD, PIECE)
        counts = starts.to(tl.int32) | (is_long.to(tl.int32) << BITS) | (is_piece.to(tl.int32) << (2 * BITS))
        before = tl.cumsum(counts, axis=0) - counts  # in the lanes before, all three in one scan
        total = tl.sum(counts)
        num_long = (total >> BITS) & FIELD
        run = first_run + (before & FIELD)
        long_run = first_long + ((before >> BITS) & FIELD)
        piece = first_piece + (before >> (2 * BITS))
        tl.store(runs.run_starts + run, slot, mask=key != previous)  # padding ends the last run
        if num_long > 0:
            tl.store(long_runs.runs + long_run, run, mask=is_long)
            tl.store(long_runs.first_pieces + long_run, piece, mask=is_long)

        last = tl.load(keys_ptr + start + tl.full([1], BLOCK - 1, tl.int32)).to(tl.int64)
        several_tables = tl.max((last >= next_key).to(tl.int32), axis=0) > 0
        if several_tables:
            write_rows(runs, key_tables, table_of(key_tables, num_tables, key), key, run, starts)
            table = table_of(key_tables, num_tables, last)
            next_key = tl.load(key_tables.key_base + table + 1, mask=table + 1 < num_tables, other=no_key)
            next_key = tl.where(last == no_key, last + 1, next_key)
            for bound in range(0, num_bounds):  # the first slot at or past each bucket's first key
                bucket_key = tl.load(bucket_keys_ptr + bound)
                crosses = (previous < bucket_key) & (key >= bucket_key)
                range_ptr = ranges_ptr + bound * KINDS + tl.zeros([BLOCK], tl.int32)
                tl.store(range_ptr + RUNS, run, mask=crosses)
                tl.store(range_ptr + LONG_RUNS, long_run, mask=crosses)
                tl.store(range_ptr + PIECES, piece, mask=crosses)
        else:
            write_rows(runs, key_tables, table, key, run, starts)
        first_run += total & FIELD
        first_long += num_long
        first_piece += total >> (2 * BITS)


@triton.jit
def bucket_range(ranges_ptr, bucket, KIND: tl.constexpr):
    """The range that a bucket owns of the runs, long runs or pieces."""
    begin_ptr = ranges_ptr + bucket * KINDS + KIND
    return tl.load(begin_ptr), tl.load(begin_ptr + KINDS)


def most_pieces(num_slots: int, num_rows: int, long_run: LongRunConfig) -> int:
    """A run of n entries has at most n / min(piece_length, 2 * threshold) cuts, and where pieces are not shorter than
    the threshold at most n / threshold pieces."""
    most_long = num_slots // long_run.threshold
    pieces = num_slots // min(long_run.piece_length, 2 * long_run.threshold) + min(most_long, num_rows)
    return min(pieces, most_long) if long_run.piece_length >= long_run.threshold else pieces


class FoundRuns(NamedTuple):
    """The tables, and room for what the first pass tells the second."""

    tables: RunTables
    counts: Tensor  # [kinds * programs] int32


def empty_tables(
    num_slots: int, programs: int, long_run: LongRunConfig, spec: OperatorSpec, device: torch.device
) -> FoundRuns:
    """From one allocation, or two where the places of rows need 64 bits."""
    layout = spec.layout
    most_runs = min(num_slots, layout.no_key)
    most_long = min(num_slots // long_run.threshold, layout.no_key)
    dtypes = {"weight_offsets": layout.offset_dtype, "state_rows": layout.key_dtype}
    narrow = {name: most_runs for name, dtype in dtypes.items() if dtype == torch.int32}
    wide = {name: most_runs for name, dtype in dtypes.items() if dtype == torch.int64}
    part = carve(
        device,
        torch.int32,
        run_starts=most_runs + 1,
        long_runs=most_long,
        first_pieces=most_long,
        ranges=KINDS.value * (len(layout.buckets) + 1),
        counts=KINDS.value * programs,
        **narrow,
    )
    part |= carve(device, torch.int64, **wide)
    tables = RunTables(
        runs=Runs(part["run_starts"], part["weight_offsets"], part["state_rows"]),
        long_runs=LongRuns(part["long_runs"], part["first_pieces"]),
        ranges=part["ranges"],
    )
    return FoundRuns(tables, part["counts"])


@planned
def plan_find_runs(long_run: LongRunConfig, target: Target) -> tuple[Constants, Constants]:
    config = select_runs()
    assert config.block <= MOST_BLOCK
    shared = {
        "BLOCK": config.block,
        "THRESHOLD": long_run.threshold,
        "PIECE": long_run.piece_length,
        **launch_options(config.num_warps, config.registers),
    }
    most_programs = target.multiprocessors * config.programs_per_multiprocessor
    return Constants(shared), Constants(shared, PROGRAMS=1 << (most_programs - 1).bit_length())


def find_runs(*, keys: Tensor, seed_and_step: Tensor, long_run: LongRunConfig, spec: OperatorSpec) -> RunTables:
    """Sorted keys, the last of them padding -> runs. Advances the step."""
    target = target_of(keys.device)
    config = select_runs()
    layout = spec.layout
    on_device = layout.on_device(keys.device)
    num_slots = keys.numel()
    assert num_slots % config.block == 0
    (programs,) = fixed_grid(target, config.programs_per_multiprocessor, num_slots // config.block)
    blocks = cdiv(num_slots // config.block, programs)  # of each program
    programs = cdiv(num_slots // config.block, blocks)
    tables, counts = empty_tables(num_slots, programs, long_run, spec, keys.device)
    shared = {
        "counts_ptr": counts,
        "keys_ptr": keys,
        "num_slots": num_slots,
        "slots_per_program": blocks * config.block,
        "no_key": layout.no_key,
    }
    of_counting, of_writing = plan_find_runs(long_run, target)
    launch(count_runs_kernel, (programs,), of_counting, **shared)
    launch(
        write_runs_kernel,
        (programs,),
        of_writing,
        runs=tables.runs,
        long_runs=tables.long_runs,
        ranges_ptr=tables.ranges,
        seed_and_step_ptr=seed_and_step,
        key_tables=on_device.key_tables,
        bucket_keys_ptr=on_device.bucket_keys,
        num_tables=len(layout.rows),
        num_bounds=len(layout.buckets) + 1,
        **shared,
    )
    return tables
