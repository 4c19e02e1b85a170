"""GPU time of calls: the durations of all device activity (kernels, memsets, copies), from one profile.

Only the device side is traced, and only three kinds of its events count: ranges that operators or users put on the
device's track span kernels that are there themselves. Calls are told apart by a marker kernel, `torch.cuda._sleep`,
which no provider launches; the device is waited for around it, so no other clock is needed. What the marker is
called in a profile is read from a first, short profile:

    flush | marker | forward | marker | flush | marker | backward | marker | flush ...
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

DEVICE_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
MARKER_CYCLES = 1000


class DeviceEvent(NamedTuple):
    name: str
    start: float  # us
    duration: float  # us


class ProfileError(Exception):
    """The profile does not show what was run."""


def device_events(trace: dict[str, Any]) -> list[DeviceEvent]:
    """Kernels, memsets and copies of a Chrome trace, in order of their start."""
    events = [
        DeviceEvent(event["name"], float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in DEVICE_KINDS
    ]
    return sorted(events, key=lambda event: event.start)


def split_calls(events: list[DeviceEvent], calls: int, marker: str) -> list[list[DeviceEvent]]:
    """The events of each of the last `calls` calls, those between its two markers."""
    marked = [i for i, event in enumerate(events) if event.name == marker]
    if len(marked) < 2 * calls or len(marked) % 2:
        raise ProfileError(f"the profile shows {len(marked)} markers, expected at least {2 * calls}")
    marked = marked[-2 * calls :]
    return [events[begin + 1 : end] for begin, end in zip(marked[::2], marked[1::2], strict=True)]


def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    if name.startswith(("Memset", "Memcpy")):
        return " ".join(name.split()[:1]) + " " + re.sub(r".*\((.*)\).*", r"\1", name)
    functor = re.search(r"(\w+)Functor", name) if "elementwise" in name else None
    flat = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    depth, kept = 0, []
    for character in flat:
        depth += character == "<"
        if depth == 0:
            kept.append(character)
        depth -= character == ">"
    base = "".join(kept).split("(")[0].split("::")[-1].strip()
    return f"{base} {functor.group(1)}" if functor else base


class CallProfile(NamedTuple):
    """What repeated calls did on the device."""

    totals: list[float]  # us, of each repetition
    kernels: list[dict[str, Any]]  # name, us (median over repetitions of the sum), launches; longest first


def summarise(calls: list[list[DeviceEvent]]) -> CallProfile:
    """Totals, and the per-kernel split."""
    if not any(calls):
        raise ProfileError("the profile shows no device activity")
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(calls))
    launches: dict[str, int] = defaultdict(int)
    for number, events in enumerate(calls):
        for event in events:
            name = short_name(event.name)
            sums[name][number] += event.duration
            launches[name] += 1
    kernels = [
        {"name": name, "us": round(statistics.median(us), 2), "launches": round(launches[name] / len(calls), 2)}
        for name, us in sums.items()
    ]
    kernels.sort(key=lambda kernel: -float(kernel["us"]))  # type: ignore[arg-type]
    return CallProfile([sum(event.duration for event in events) for events in calls], kernels)


def _marked(call: Callable[[], Any], before: Callable[[], Any]) -> Any:
    """Run a call between two markers, on a device that is otherwise idle."""
    before()
    torch.cuda.synchronize()
    torch.cuda._sleep(MARKER_CYCLES)
    result = call()
    torch.cuda.synchronize()
    torch.cuda._sleep(MARKER_CYCLES)
    torch.cuda.synchronize()
    return result


def profile_calls(calls: Sequence[Callable[[], Any]], flush: Callable[[], Any]) -> list[list[DeviceEvent]]:
    """The events of each call, each on a cold L2."""

    def run() -> None:
        for call in calls:
            _marked(call, flush)

    activities, marker = _calibrate()
    return split_calls(device_events(_trace(run, activities)), len(calls), marker)


def profile_steps(
    forward: Callable[[], Any], backward: Callable[[Any], Any], flush: Callable[[], Any], repetitions: int
) -> tuple[CallProfile, CallProfile]:
    """Profiles of forward() and of backward(its result), each on a cold L2. One more repetition runs first and does
    not count."""

    def run() -> None:
        for _ in range(repetitions + 1):
            output = _marked(forward, flush)
            _marked(functools.partial(backward, output), flush)
            del output

    activities, marker = _calibrate()
    calls = split_calls(device_events(_trace(run, activities)), 2 * repetitions, marker)
    return summarise(calls[::2]), summarise(calls[1::2])


@functools.cache
def _calibrate() -> tuple[tuple[Any, ...], str]:
    """What to trace (the device alone, or the host too where that shows nothing), and the marker's name."""

    def mark() -> None:
        for _ in range(4):
            torch.cuda._sleep(MARKER_CYCLES)
        torch.cuda.synchronize()

    kind = torch.profiler.ProfilerActivity
    for activities in ((kind.CUDA,), (kind.CPU, kind.CUDA)):
        events = device_events(_trace(mark, activities))
        if events:
            return activities, events[-1].name
    raise ProfileError("the profiler shows no device activity")


def _trace(run: Callable[[], None], activities: tuple[Any, ...]) -> dict[str, Any]:
    with torch.profiler.profile(activities=activities) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())
