"""What counting the ids of small tables gains or costs: a step with none of them counted, those that the route chooses,
and all, in turn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench import tables
from bench.interleaved import REQUESTS, kernel_times
from bench.measure import make_grad
from bench.providers import Fbtriton
from bench.workloads import Workload, make_requests
from fbtriton.config import HistogramConfig, force_config

MODES = {"none": HistogramConfig(max_rows=0), "chosen": None, "all": HistogramConfig(min_length=0.0)}


def _step(provider: Fbtriton, config: HistogramConfig | None, grad: torch.Tensor, request: Any) -> None:
    with force_config(histogram=config):
        provider.backward(provider.forward(request), grad)


def measure(workload: Workload, ids: str) -> dict[str, dict[str, float]]:
    """For each mode the median GPU time of every kernel and of all, us."""
    device = torch.device("cuda")
    provider = Fbtriton(workload, ids, "", device, 1)
    requests = make_requests(workload, REQUESTS, 1, device, ids)
    grad = make_grad(workload, 1, device, provider.output_dtype)
    return kernel_times({name: partial(_step, provider, config, grad) for name, config in MODES.items()}, requests)


def counting_costs(workloads: list[Workload], ids: str, out: Path | None) -> None:
    """Print the time of a step in each mode."""
    gpu = torch.cuda.get_device_name()
    table = Table(title=f"small tables counted, on {gpu}, {ids} ids: GPU time of a step, us")
    for name in ("workload", *MODES):
        table.add_column(name, justify="left" if name == "workload" else "right")
    record = {}
    for workload in workloads:
        times = record[workload.name] = measure(workload, ids)
        table.add_row(workload.name, *[f"{times[name]['all']:.1f}" for name in MODES])
        torch.cuda.empty_cache()
    if out:
        out.write_text(json.dumps({"gpu": gpu, "ids": ids, "times": record}) + "\n")
    tables.console().print(table)
