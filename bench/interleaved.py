"""GPU time of the same work in several modes, in turn, so that whatever drifts meets all of them alike."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.device_time import profile_calls, short_name
from bench.measure import FLUSH_BYTES
from bench.workloads import Request

REPETITIONS = 2
REQUESTS = 4


def kernel_times(
    modes: Mapping[str, Callable[[Request], Any]],
    requests: Sequence[Request],
    groups: Mapping[str, Collection[str]] | None = None,
) -> dict[str, dict[str, float]]:
    """For each mode the median GPU time of a call, us: of every kernel, of each group of kernels, and of "all". Every
    mode runs once before, because it may compile."""
    for call in modes.values():
        call(requests[0])
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=requests[0].indices.device)
    turns = [(name, request) for _ in range(REPETITIONS) for request in requests for name in modes]
    calls = [partial(modes[name], request) for name, request in turns]
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in modes}
    for (name, _), events in zip(turns, profile_calls(calls, buffer.zero_), strict=True):
        sums: dict[str, float] = defaultdict(float)
        for event in events:
            sums[short_name(event.name)] += event.duration
        of_groups = {
            group: sum(sums.get(kernel, 0.0) for kernel in kernels) for group, kernels in (groups or {}).items()
        }
        for kernel, us in {**sums, **of_groups, "all": sum(sums.values())}.items():
            samples[name][kernel].append(us)
    return {name: {k: round(statistics.median(us), 2) for k, us in found.items()} for name, found in samples.items()}
