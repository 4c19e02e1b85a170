"""What the bounds check costs: the forward without one, with the fused one and with the separate one, in turn."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import tables
from bench.device_time import profile_calls, short_name
from bench.measure import FLUSH_BYTES
from bench.providers import Fbtriton
from bench.workloads import Workload, make_requests

MODES = {"off": ("off", True), "fused": ("warning", True), "separate": ("warning", False)}
REPETITIONS = 2
REQUESTS = 4


def _forward(provider: Fbtriton, spec: Any, request: Any) -> Any:
    provider.module.spec = spec
    return provider.forward(request)


def measure(workload: Workload, ids: str) -> dict[str, dict[str, float]]:
    """For each mode the median GPU time of every kernel and of all, us."""
    device = torch.device("cuda")
    provider = Fbtriton(workload, ids, "", device, 1)
    requests = make_requests(workload, REQUESTS, 1, device, ids)
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    base = provider.module.spec
    specs = {name: replace(base, bounds_check=mode, fused_bounds_check=fused) for name, (mode, fused) in MODES.items()}
    turns = [(name, request) for _ in range(REPETITIONS) for request in requests for name in MODES]
    calls = [partial(_forward, provider, specs[name], request) for name, request in turns]
    for call in calls[: len(MODES)]:
        call()  # compiles
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in MODES}
    for (name, _), events in zip(turns, profile_calls(calls, buffer.zero_), strict=True):
        sums: dict[str, float] = defaultdict(float)
        for event in events:
            sums[short_name(event.name)] += event.duration
        for kernel, us in [*sums.items(), ("all", sum(sums.values()))]:
            samples[name][kernel].append(us)
    return {name: {k: round(statistics.median(us), 2) for k, us in found.items()} for name, found in samples.items()}


def check_costs(workloads: list[Workload], ids: str, out: Path | None) -> None:
    """Print what each check adds to the forward."""
    gpu = torch.cuda.get_device_name()
    table = Table(title=f"bounds check on {gpu}, {ids} ids: GPU time of the forward, us")
    for name in ("workload", *MODES, "fused adds", "separate adds"):
        table.add_column(name, justify="left" if name == "workload" else "right")
    record = {}
    for workload in workloads:
        times = record[workload.name] = measure(workload, ids)
        totals = {name: times[name]["all"] for name in MODES}
        added = [totals[name] - totals["off"] for name in ("fused", "separate")]
        shown = [f"{us:.1f} us, {100 * us / totals['off']:.1f} %" for us in added]
        table.add_row(workload.name, *[f"{totals[name]:.1f}" for name in MODES], *shown)
        torch.cuda.empty_cache()
    if out:
        out.write_text(json.dumps({"gpu": gpu, "ids": ids, "times": record}) + "\n")
    tables.console().print(table)
