"""What the bounds check costs: the forward without one, with the fused one and with the separate one, in turn."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import tables
from bench.interleaved import REQUESTS, kernel_times
from bench.providers import Fbtriton
from bench.workloads import Workload, make_requests

MODES = {"off": ("off", True), "fused": ("warning", True), "separate": ("warning", False)}


def _forward(provider: Fbtriton, spec: Any, request: Any) -> Any:
    provider.module.spec = spec
    return provider.forward(request)


def measure(workload: Workload, ids: str) -> dict[str, dict[str, float]]:
    """For each mode the median GPU time of every kernel and of all, us."""
    device = torch.device("cuda")
    provider = Fbtriton(workload, ids, "", device, 1)
    requests = make_requests(workload, REQUESTS, 1, device, ids)
    base = provider.module.spec
    specs = {name: replace(base, bounds_check=mode, fused_bounds_check=fused) for name, (mode, fused) in MODES.items()}
    return kernel_times({name: partial(_forward, provider, spec) for name, spec in specs.items()}, requests)


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
