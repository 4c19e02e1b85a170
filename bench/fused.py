"""Long runs in one launch beside accumulating and applying apart: GPU time of the kernels that long runs take, in turn,
and whether both leave the same weights. `tools/tlx_record.py` makes a page of what it writes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import results as store
from bench import tables
from bench.interleaved import REQUESTS, kernel_times
from bench.measure import make_grad
from bench.providers import Fbtriton
from bench.workloads import Request, Workload, make_requests
from fbtriton import tlx
from fbtriton.config import FusedConfig, force_config, select_long_run
from fbtriton.layout import TableLayout

KERNELS = (
    "grad_accum_kernel", "add_groups_kernel", "apply_kernel", "clear_rows_kernel",
    "fused_long_run_kernel",
)  # fmt: skip
APART = "apart"


def variants(block_dims: tuple[int, ...]) -> dict[str, FusedConfig | bool]:
    """What this GPU and this Triton can run, by name."""
    clc = tlx.available() and torch.cuda.get_device_capability()[0] >= 10
    reduce = tlx.available() and torch.cuda.get_device_capability()[0] >= 9
    found: dict[str, FusedConfig | bool] = {APART: False}
    for programs in (16, 32):
        found[f"slots, {programs} programs"] = FusedConfig(programs_per_multiprocessor=programs)
    if reduce:
        found["TMA, 32 programs"] = FusedConfig(reduce=True)
    for tiles in (32, 64, 128) if clc else ():
        found[f"slots, CLC, {tiles} tiles"] = FusedConfig(clc=True, programs_per_multiprocessor=tiles)
        found[f"TMA, CLC, {tiles} tiles"] = FusedConfig(clc=True, reduce=True, programs_per_multiprocessor=tiles)
    return {name: v for name, v in found.items() if isinstance(v, bool) or v.fits(block_dims)}


def long_run_sizes(workload: Workload, request: Request) -> dict[str, int]:
    """How many ids of a request are in long runs, and how many runs and pieces those are."""
    config = select_long_run(workload.dims[0])
    layout = TableLayout(workload.rows, workload.dims, workload.feature_tables, itemsize=2)  # keys do not depend on it
    first_rows = [layout.key_bases[table] for table in workload.feature_tables]
    ends = request.offsets[torch.tensor(workload.samples).cumsum(0).to(request.offsets.device)].tolist()
    keys = request.indices.to(torch.int64, copy=True)
    for first_row, start, end in zip(first_rows, [0, *ends], ends, strict=False):
        keys[start:end] += first_row
    threshold, piece = config.threshold, config.piece_length
    lengths = torch.unique(keys, return_counts=True)[1]
    ends_of_runs = lengths.cumsum(0)[lengths >= threshold]
    lengths = lengths[lengths >= threshold]
    first_cuts = (ends_of_runs - lengths + threshold + piece - 1) // piece * piece
    cuts = (ends_of_runs - threshold - first_cuts + piece).clamp(min=0) // piece
    return {"ids": keys.numel(), "in long runs": int(lengths.sum()), "long runs": lengths.numel(),
            "pieces": int((1 + cuts).sum())}  # fmt: skip


def _step(provider: Fbtriton, fused: Any, grad: torch.Tensor, request: Any) -> None:
    with force_config(fused=fused):
        provider.backward(provider.forward(request), grad)


def measure(workload: Workload, ids: str) -> dict[str, dict[str, Any]]:
    """For each variant the median GPU time of every kernel and of all, us, and rows that differ from the others'."""
    device = torch.device("cuda")
    provider = Fbtriton(workload, ids, "", device, 1)
    module = provider.module
    requests = make_requests(workload, REQUESTS, 1, device, ids)
    grad = make_grad(workload, 1, device, provider.output_dtype)
    choices = variants(tuple(bucket.block_dim for bucket in module.spec.layout.buckets))
    differing = _differing(provider, choices, requests[0], grad)
    steps = {name: partial(_step, provider, fused, grad) for name, fused in choices.items()}
    times = kernel_times(steps, requests, {"long runs": KERNELS})
    return {name: {**found, "differing weights": differing[name]} for name, found in times.items()}


def _differing(provider: Fbtriton, choices: dict[str, Any], request: Any, grad: torch.Tensor) -> dict[str, int | None]:
    """Elements of the weights that come out otherwise than apart, or None if memory is short. Compiles, too."""
    module = provider.module
    if 3 * module.weights.nbytes > torch.cuda.mem_get_info()[1]:
        for fused in choices.values():
            _step(provider, fused, grad, request)
        return dict.fromkeys(choices)
    saved = [tensor.clone() for tensor in module.buffers()]
    found: dict[str, int | None] = {}
    expected = None
    for name, fused in choices.items():
        for tensor, before in zip(module.buffers(), saved, strict=True):
            tensor.copy_(before)
        _step(provider, fused, grad, request)
        if expected is None:
            expected = module.weights.clone()
        found[name] = int((module.weights != expected).sum())
    return found


def fused_costs(workloads: list[Workload], ids: str, out: Path | None) -> None:
    """Print the time of long runs in every variant, and write all kernels' if asked to."""
    gpu = torch.cuda.get_device_name()
    table = Table(title=f"long runs on {gpu}, {ids} ids: GPU time of their kernels, us (weights that differ)")
    table.add_column("workload", no_wrap=True)
    result = store.new_results(None, {}, [])
    head = {name: result[name] for name in ("command", "date", "commit", "versions")}
    record: dict[str, Any] = {}
    sizes: dict[str, dict[str, int]] = {}
    names: list[str] = []
    for workload in workloads:
        sizes[workload.name] = long_run_sizes(workload, make_requests(workload, 1, 1, torch.device("cuda"), ids)[0])
        record[workload.name] = measure(workload, ids)
        names += [name for name in record[workload.name] if name not in names]
        torch.cuda.empty_cache()
        if out:
            out.write_text(json.dumps({**head, "gpu": gpu, "ids": ids, "sizes": sizes, "times": record}) + "\n")
    for name in names:
        table.add_column(name, justify="right")
    for measured, times in record.items():
        cells = [times.get(name) for name in names]
        table.add_row(measured, *[f"{t['long runs']:.1f} ({t['differing weights']})" if t else "" for t in cells])
    tables.console().print(table)
