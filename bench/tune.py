"""Which configuration is fastest: every candidate of one kernel on workloads, and rows to paste into the tables of
`fbtriton.config`.

Candidates are compiled by as many processes as there are cores, without the GPU, into Triton's cache; then one process
times them in turn, each on distinct requests with a cold L2. A kernel's launches are told apart by their order, one
for each dim, so one forced configuration gives the time of each dim.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from bench import tables
from bench.measure import FLUSH_BYTES
from bench.providers import Fbtriton
from bench.workloads import DTYPES, ID_DTYPES, Request, Workload, make_request, make_requests

REPETITIONS = 3
SHOWN = 3  # fastest candidates of each workload


@dataclass(frozen=True)
class Tunable:
    """One kernel: how its configuration is forced, and which there are to try.

    A configuration is for one dim, and the kernel launched once for each, unless it is for all dims.
    """

    field: str  # of fbtriton.config.ForcedConfig
    kernels: tuple[str, ...]  # whose time counts; empty = everything
    backward: bool
    candidates: Callable[[int, int], Iterator[Any]]  # for rows of so many elements of so many bytes
    all_dims: bool = False


def gather_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import GatherConfig

    block = 1 << (dim - 1).bit_length()
    widths = {block, max(dim & -dim, 16)} if dim < block else {block}  # all columns, or parts without a remainder
    for columns in sorted(width for width in widths if width <= block):
        for bags, rows, unroll, warps in itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4), (2, 4), (1, 2)):
            lane_bytes = bags * rows * columns * itemsize // (32 * warps)
            if 16 <= lane_bytes <= 64 and lane_bytes * unroll <= 128 or bags == 64 and rows == 1 and lane_bytes < 16:
                for registers in (48, 56, 64):  # more warps, or more loads in flight
                    yield GatherConfig(bags, rows, warps, unroll, registers, columns)


def count_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import HistogramConfig

    options = itertools.product((64, 128, 256), (4, 8, 16), (1, 2), (48, 64, 96, None))
    for ids, bags, warps, registers in options:
        yield HistogramConfig(ids=ids, count_bags=bags, count_warps=warps, count_registers=registers)


def pool_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import HistogramConfig

    options = itertools.product((32, 64, 128), (4, 8), (64, 128, 256), (96, 128, None))
    for bags, warps, row_bytes, registers in options:
        yield HistogramConfig(pool_bags=bags, pool_warps=warps, pool_row_bytes=row_bytes, pool_registers=registers)


def product_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import HistogramConfig

    for chunk, bags, columns, warps in itertools.product((256, 512, 1024, 2048), (32, 64), (64, 128), (4, 8)):
        yield HistogramConfig(grad_chunk=chunk, grad_bags=bags, grad_columns=columns, grad_warps=warps)


def linearise_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import LineariseConfig

    for block, ways, warps, registers in itertools.product((1024, 2048), (64, 256), (4, 8), (None, 80, 64, 48)):
        yield LineariseConfig(block, ways, warps, registers)


def runs_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import RunsConfig

    for block, warps, registers in itertools.product((256, 512), (2, 4, 8), (None, 48, 56, 64)):
        if 2 <= block // (32 * warps) <= 4:
            yield RunsConfig(block, warps, 32 // warps, registers)
    for programs in (12, 16):
        yield RunsConfig(programs_per_multiprocessor=programs)


def short_run_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import ShortRunConfig

    block = 1 << (dim - 1).bit_length()
    options = itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4), (1, 2, 4), (None, 64, 80, 96))
    for runs, unroll, warps, registers in options:
        elements = runs * block // (32 * warps)  # of a lane
        if 8 <= elements <= 32 and elements * unroll <= 64 or block < 16 and runs == 64 and warps == 1:
            yield ShortRunConfig(runs, warps, unroll, registers=registers)


def long_run_candidates(dim: int, itemsize: int) -> Iterator[Any]:
    from fbtriton.config import LongRunConfig

    cuts = [(24, 96, 64), (32, 64, 64), (32, 96, 64), (32, 128, 64), (64, 128, 64), (32, 128, 128), (32, 192, 64)]
    for (threshold, piece, fan_in), rows, unroll in itertools.product(cuts, (1, 2, 4, 8), (2, 4)):
        if 8 <= rows * dim // 32 <= 32 and rows * unroll * dim // 32 <= 64:
            slots = max(1, min(16, 512 >> (dim - 1).bit_length()))
            yield LongRunConfig(threshold, piece, fan_in, rows, unroll, slots, registers=64)


TUNABLES = {
    "gather": Tunable("gather", ("gather_kernel",), False, gather_candidates),
    "count": Tunable("histogram", ("count_kernel",), False, count_candidates, all_dims=True),
    "pool": Tunable("histogram", ("pool_counts_kernel",), False, pool_candidates, all_dims=True),
    "product": Tunable(
        "histogram", ("multiply_gradients_kernel", "apply_counted_kernel"), True, product_candidates, all_dims=True
    ),
    "linearise": Tunable("linearise", ("linearise_kernel",), True, linearise_candidates, all_dims=True),
    "runs": Tunable("runs", ("count_runs_kernel", "write_runs_kernel"), True, runs_candidates, all_dims=True),
    "short-run": Tunable("short_run", ("short_run_kernel",), True, short_run_candidates),
    "long-run": Tunable("long_run", (), True, long_run_candidates, all_dims=True),
}


def _forced_step(tunable: Tunable, candidate: Any, provider: Fbtriton, request: Request) -> None:
    """One forward, and a backward if that is where the kernel is; candidate None = as it is chosen now."""
    from fbtriton.config import force_config

    with force_config(**({tunable.field: candidate} if candidate else {})):
        output = provider.forward(request)
        if tunable.backward:
            provider.backward(output, torch.ones_like(output))


def compile_candidates(workload: Workload, tunable: Tunable, candidates: list[Any], ids: str, arch: int) -> int:
    """Fill Triton's cache; returns how many did not compile. Runs in a process of its own."""
    from bench.occupancy import shrink, silence
    from fbtriton.compile_only import compile_only

    silence()
    small = shrink(workload)
    provider = Fbtriton(small, ids, "", torch.device("cpu"), 1)
    request = make_request(small, 0, torch.device("cpu"), ID_DTYPES[ids])
    failed = 0
    for candidate in candidates:
        try:
            with compile_only("cuda", arch):
                _forced_step(tunable, candidate, provider, request)
        except Exception:
            failed += 1  # it fails again, and says why, when it is timed
    return failed


def _compile_all(workloads: list[Workload], tunable: Tunable, ids: str, arch: int, progress: Progress) -> None:
    from bench.occupancy import unique

    cores = os.cpu_count() or 1
    jobs = []
    for workload in unique(workloads):
        candidates = _candidates(workload, tunable)
        jobs += [(workload, candidates[start::16]) for start in range(16)]
    task = progress.add_task("compiling", total=len(jobs))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(compile_candidates, workload, tunable, part, ids, arch) for workload, part in jobs if part
        ]
        for _ in as_completed(waiting):
            progress.advance(task)


def _candidates(workload: Workload, tunable: Tunable) -> list[Any]:
    """Candidate n of every dim goes into round n; a dim with fewer starts again."""
    itemsize = DTYPES[workload.dtype].itemsize
    if tunable.all_dims:
        return list(tunable.candidates(max(workload.dims), itemsize))
    found = {dim: list(tunable.candidates(dim, itemsize)) for dim in sorted(set(workload.dims))}
    rounds = max(map(len, found.values()))
    return [{dim: options[n % len(options)] for dim, options in found.items()} for n in range(rounds)]


def _time(workload: Workload, tunable: Tunable, ids: str, progress: Progress) -> dict[int, dict[Any, float]]:
    """For each dim the median time of each candidate, us; None = as it is chosen now."""
    from bench.device_time import profile_calls, short_name

    device = torch.device("cuda")
    provider = Fbtriton(workload, ids, "", device, 1)
    requests = make_requests(workload, REPETITIONS, 1, device, ids)
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    candidates: list[Any] = [None, *_candidates(workload, tunable)]
    task = progress.add_task(workload.name, total=len(candidates))
    calls, owners, reasons = [], [], []
    for candidate in candidates:
        progress.advance(task)
        call = partial(_forced_step, tunable, candidate, provider)
        try:
            call(requests[0])
            torch.cuda.synchronize()
        except Exception as error:
            reasons.append(f"{candidate} failed: {type(error).__name__}: {error}"[:300])
            continue
        for request in requests:
            calls.append(partial(call, request))
            owners.append(candidate)
    dims = [max(workload.dims)] if tunable.all_dims else sorted(set(workload.dims))
    samples: dict[int, dict[Any, list[float]]] = {dim: {} for dim in dims}
    for owner, events in zip(owners, profile_calls(calls, buffer.zero_), strict=True):
        times = [e.duration for e in events if not tunable.kernels or short_name(e.name) in tunable.kernels]
        if tunable.all_dims:
            times = [sum(times)]
        for dim, us in zip(dims, times, strict=True):
            config = owner[dim] if isinstance(owner, dict) else owner
            samples[dim].setdefault(config, []).append(us)
    for reason in reasons:
        progress.console.print(f"{workload.name}: {reason}")
    return {dim: {config: statistics.median(us) for config, us in found.items()} for dim, found in samples.items()}


def _mean_length(workload: Workload) -> float:
    return workload.expected_entries / sum(workload.samples)


def _row(gpu: str, workload: Workload, dim: int, config: Any) -> str:
    values = ", ".join(map(str, asdict(config).values()))
    where = f'"{gpu}", "{workload.name}", "{time.strftime("%Y-%m-%d")}"'
    what = f"{dim}, {DTYPES[workload.dtype].itemsize}, {_mean_length(workload):.1f}"
    return f"    TableRow({where}, {what}, {type(config).__name__}({values})),"


def tune(kernel: str, workloads: list[Workload], ids: str, out: Path | None) -> None:
    """Print the fastest configurations of one kernel for each workload, and rows to paste."""
    tunable = TUNABLES[kernel]
    properties = torch.cuda.get_device_properties(0)
    table = Table(title=f"{kernel}: fastest configurations on {properties.name}, us")
    for name in ("workload", "dim", "ids a bag", "now", *(f"{place}." for place in range(1, SHOWN + 1))):
        table.add_column(name)
    rows, record = [], []
    console = tables.console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        _compile_all(workloads, tunable, ids, 10 * properties.major + properties.minor, progress)
        for workload in workloads:
            for dim, times in _time(workload, tunable, ids, progress).items():
                best = sorted((config for config in times if config), key=times.__getitem__)
                shown = [f"{times[config]:.1f}: {_short(config)}" for config in best[:SHOWN]]
                table.add_row(workload.name, str(dim), f"{_mean_length(workload):.1f}", f"{times[None]:.1f}", *shown)
                rows.append(_row(properties.name, workload, dim, best[0]))
                record += [
                    {"workload": workload.name, "dim": dim, "us": round(us, 2), "config": config and asdict(config)}
                    for config, us in times.items()
                ]
            torch.cuda.empty_cache()
    if out:
        out.write_text(json.dumps({"kernel": kernel, "gpu": properties.name, "ids": ids, "times": record}) + "\n")
    tables.console().print(table)
    print("\n".join(rows))


def _short(config: Any) -> str:
    return " ".join(map(str, asdict(config).values()))
