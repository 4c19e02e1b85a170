"""Group the entries of a batch by row: linearise, sort, find the runs.

The sort is stable, so the entries of a run stay in the order of the batch and every later sum has one fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fbtriton._triton import tl, triton
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.linearise import linearise
from fbtriton.backward.sort import sort_pairs
from fbtriton.batch import BatchShape
from fbtriton.config import fixed_grid, select_entry, target_of
from fbtriton.layout import Bags, Entries, OperatorSpec, SortedRuns


@triton.jit(do_not_specialize=["num_entries", "no_key"])
def write_runs_kernel(num_runs_ptr, runs, keys_ptr, run_counts_ptr, num_entries, no_key, BLOCK: tl.constexpr):
    """For each sorted entry: its run if it starts one."""
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


def find_runs(*, keys: Tensor, entries: Entries, spec: OperatorSpec) -> SortedRuns:
    """Sorted keys -> runs."""
    config = select_entry()
    num_entries = keys.numel()
    starts = torch.ones(num_entries, dtype=torch.int32, device=keys.device)
    starts[1:] = keys[1:] != keys[:-1]
    run_counts = torch.cumsum(starts, 0, dtype=torch.int32)
    runs = SortedRuns(
        num_runs=torch.empty(1, dtype=torch.int32, device=keys.device),
        run_keys=torch.empty_like(keys),
        run_starts=torch.empty(num_entries + 1, dtype=torch.int32, device=keys.device),
        entries=entries,
    )
    blocks = triton.cdiv(num_entries, config.block)
    write_runs_kernel[fixed_grid(target_of(keys.device), config.programs_per_multiprocessor, blocks)](
        num_runs_ptr=runs.num_runs,
        runs=runs,
        keys_ptr=keys,
        run_counts_ptr=run_counts,
        num_entries=num_entries,
        no_key=spec.layout.no_key,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
    return runs


def transpose(*, bags: Bags, shape: BatchShape, grad_output: Tensor, form: EntryForm, spec: OperatorSpec) -> SortedRuns:
    """Bags -> runs: every row of the batch once, with all its entries."""
    keys, entries = linearise(bags=bags, shape=shape, grad_output=grad_output, form=form, spec=spec)
    bits = max(1, spec.layout.no_key.bit_length())
    keys, payload = sort_pairs(keys, entries.payload, bits)
    return find_runs(keys=keys, entries=entries._replace(payload=payload), spec=spec)
