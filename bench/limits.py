"""The least time that a workload can take: bytes that must move, over the copy bandwidth of the same GPU.

The byte model, for one request of n ids that touch u distinct rows:

    forward    each distinct row once, the output once, ids, offsets and per-sample weights once
    backward   a sort of the ids: read each id and write key and payload (4 + 4 bytes), 4 bytes of histogram, and
                   16 bytes for each 8-bit pass over the bits of the row number;
               runs: read 8 bytes for each id, write 20 for each run;
               update: the gradient once, each distinct row read and written, 64 bytes for its row-wise state (one
                   sector read, one written), and again 4 bytes for each id, 4 more if weighted, 20 for each run

Ids of tables with at most 64 rows need no sort: counting them costs the ids once, or one byte for each row and
bag if that is less. The model leaves caches out, so it is a lower bound. Kept beside it is what passes through the
L2 unless an L1 serves it: in the forward every looked up row, the output and the ids (`lookup_bytes`), in the backward
a gradient for each id (`gradient_bytes`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.workloads import DTYPES, Request, Workload

OUTPUT_BYTES = 4  # fp32 outputs and gradients
STATE_BYTES = 64  # a sector of 32 bytes, read and written
RUN_BYTES = 20
DIGIT_BITS = 8
COUNTED_ROWS = 64  # tables up to this size are counted, not sorted

# Read bandwidth of the L2 where it was measured by others, bytes/s: RRZE-HPC/gpu-benches, gpu-l2-cache.
L2_BANDWIDTH = {"NVIDIA H200": 9.6e12}


@dataclass(frozen=True)
class Counts:
    """What a request looks up, for each table."""

    entries: list[int]
    distinct: list[int]  # rows
    bags: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def count(workload: Workload, request: Request) -> Counts:
    """Entries and distinct rows of a request. Waits for the device."""
    ends = [0]
    for samples in workload.samples:
        ends.append(ends[-1] + samples)
    bounds = request.offsets[torch.tensor(ends, device=request.offsets.device)].tolist()
    parts: list[list[torch.Tensor]] = [[] for _ in workload.rows]
    for feature, table in enumerate(workload.feature_tables):
        parts[table].append(request.indices[bounds[feature] : bounds[feature + 1]])
    entries, distinct = [], []
    for rows, part in zip(workload.rows, parts, strict=True):
        ids = torch.cat(part).long()
        entries.append(ids.numel())
        seen = torch.zeros(rows, dtype=torch.bool, device=ids.device)
        seen[ids[(ids >= 0) & (ids < rows)]] = True
        distinct.append(int(seen.sum()))
    return Counts(entries, distinct, sum(workload.samples))


def _row_bytes(workload: Workload, per_table: list[int]) -> int:
    size = DTYPES[workload.dtype].itemsize
    return sum(number * dim * size for number, dim in zip(per_table, workload.dims, strict=True))


def _output_bytes(workload: Workload) -> int:
    pairs = zip(workload.samples, workload.feature_dims, strict=True)
    return OUTPUT_BYTES * sum(samples * dim for samples, dim in pairs)


def _input_bytes(workload: Workload, counts: Counts, id_bytes: int) -> int:
    weights = 4 * sum(counts.entries) if workload.weighted else 0
    return id_bytes * (sum(counts.entries) + counts.bags + 1) + weights


def forward_bytes(workload: Workload, counts: Counts, id_bytes: int) -> int:
    rows = _row_bytes(workload, counts.distinct)
    return rows + _output_bytes(workload) + _input_bytes(workload, counts, id_bytes)


def lookup_bytes(workload: Workload, counts: Counts, id_bytes: int) -> int:
    """What a forward passes through the L2 if no row is found in an L1."""
    rows = _row_bytes(workload, counts.entries)
    return rows + _output_bytes(workload) + _input_bytes(workload, counts, id_bytes)


def gradient_bytes(workload: Workload, counts: Counts) -> int:
    """What the sum of the gradients passes through the L2."""
    return OUTPUT_BYTES * sum(entries * dim for entries, dim in zip(counts.entries, workload.dims, strict=True))


def sort_passes(workload: Workload) -> int:
    """8-bit passes of a radix sort over the row numbers of the tables that are sorted."""
    rows = sum(rows for rows in workload.rows if rows > COUNTED_ROWS)
    bits = max(1, (rows - 1).bit_length()) if rows else 0
    return -(-bits // DIGIT_BITS)


def _counting_bytes(workload: Workload, counts: Counts, id_bytes: int) -> int:
    """The cheaper of reading the ids and reading saved counts, for each small table."""
    total = 0
    for table, rows in enumerate(workload.rows):
        if rows <= COUNTED_ROWS:
            bags = sum(s for s, t in zip(workload.samples, workload.feature_tables, strict=True) if t == table)
            total += min(id_bytes * counts.entries[table], bags * rows)
    return total


def backward_bytes(workload: Workload, counts: Counts, id_bytes: int) -> int:
    is_sorted = [rows > COUNTED_ROWS for rows in workload.rows]
    entries = sum(n for n, sorts in zip(counts.entries, is_sorted, strict=True) if sorts)
    runs = sum(u for u, sorts in zip(counts.distinct, is_sorted, strict=True) if sorts)
    sort = (id_bytes + 8 + 4 + 16 * sort_passes(workload)) * entries
    find_runs = 8 * entries + RUN_BYTES * runs
    update = _output_bytes(workload) + 2 * _row_bytes(workload, counts.distinct)
    update += STATE_BYTES * sum(counts.distinct) + (8 if workload.weighted else 4) * entries + RUN_BYTES * runs
    return sort + find_runs + update + _counting_bytes(workload, counts, id_bytes)


def byte_model(workload: Workload, counts: Counts, ids: str) -> dict[str, int]:
    """All byte counts of one request with ids of the given dtype."""
    id_bytes = {"int32": 4, "int64": 8}[ids]
    arguments = (workload, counts, id_bytes)
    return {
        "forward": forward_bytes(*arguments),
        "backward": backward_bytes(*arguments),
        "lookup": lookup_bytes(*arguments),
        "gradient": gradient_bytes(workload, counts),
    }


def floor_us(num_bytes: int, bandwidth: float | None) -> float | None:
    """Microseconds at a bandwidth in bytes/s; None without one."""
    return num_bytes / bandwidth * 1e6 if bandwidth else None


def copy_bandwidth(device: torch.device, repetitions: int = 15, size: int = 2**32) -> dict[str, float]:
    """Bytes read plus written in a second by copies within the device, the median of several."""
    source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(repetitions + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    times = sorted(times[3:])
    rates = [2 * source.numel() / seconds for seconds in times]
    return {"median": rates[len(rates) // 2], "low": rates[-1], "high": rates[0], "bytes": float(2 * source.numel())}
