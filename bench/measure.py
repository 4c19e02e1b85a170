"""One measurement of one provider on one workload: check it first, then time it.

A job is a JSON object, so that it can cross to a worker process; so is its result. Kinds of jobs:

    device   check against the oracle, first-call time, GPU time from a profile
    host     eager wall time, host time, CUDA graph replay, memory. In a process that never profiles, because
             the profiler's hooks stay and slow launches down
    cpu      check and wall time on CPU tensors
    limits   copy bandwidth
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import limits, oracle
from bench.device_time import ProfileError, profile_steps
from bench.providers import Provider, UnsupportedError, provider_class
from bench.workloads import Request, Workload, make_requests

FLUSH_BYTES = 2**28  # several times any L2
BLOCK_CYCLES = 20_000_000  # about 10 ms in front of a call whose host time is taken
GRAPH_CYCLES = 400_000  # about 0.2 ms, hides the launch of a graph
WALL_SECONDS = 8.0  # after which slow providers are not called again
SMALL_ENTRIES = 10_000  # on a CPU
RESERVE_BYTES = 8 * 2**30  # for requests, outputs, workspaces and the oracle beside the weights


def stats(values: list[float]) -> dict[str, Any]:
    """Median and spread: the tenth and ninetieth percentile (of few values: the ends)."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return {
        "median": round(statistics.median(ordered), 3),
        "low": round(ordered[cut], 3),
        "high": round(ordered[-1 - cut], 3),
        "n": len(ordered),
    }


class Subject:
    """A provider with requests in rotation and a gradient."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.workload = Workload.from_dict(job["workload"])
        self.device = torch.device(job["device"])
        _check_memory(self.workload, self.device)
        self.provider: Provider = provider_class(job["provider"])(
            self.workload, job["ids"], job["setting"], self.device, job["seed"]
        )
        self.requests = make_requests(self.workload, job["requests"], job["seed"], self.device, job["ids"])
        self.grad = make_grad(self.workload, job["seed"], self.device, self.provider.output_dtype)
        self.turn = 0
        cuda = self.device.type == "cuda"
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device) if cuda else None

    def next_request(self) -> Request:
        self.turn += 1
        return self.requests[self.turn % len(self.requests)]

    def forward(self) -> Tensor:
        return self.provider.forward(self.next_request())

    def backward(self, output: Tensor) -> None:
        self.provider.backward(output, self.grad)

    def flush(self) -> None:
        """Write a buffer that is larger than the L2."""
        if self.buffer is not None:
            self.buffer.zero_()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def warm_up(self) -> None:
        """Every request once: compiles what its sizes need."""
        for _ in self.requests:
            self.backward(self.forward())
        self.wait()


def _check_memory(workload: Workload, device: torch.device) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        need = workload.weight_bytes + RESERVE_BYTES * (workload.weight_bytes > RESERVE_BYTES)
        if need > free:
            raise UnsupportedError(f"needs {need / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free")


def make_grad(workload: Workload, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """In [-1, 1), representable in fp16 so that every provider gets the same numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    grad = torch.rand(workload.output_shape, generator=generator, device=device) * 2 - 1
    return grad.half().to(dtype)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job; what a provider cannot do or does wrong is a result too, with the reason."""
    result = _run_job(job)
    _clean_up()  # after everything the job held has gone out of scope
    return result


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    try:
        if job["kind"] == "limits":
            return {"status": "ok", "copy_bandwidth": limits.copy_bandwidth(torch.device(job["device"]))}
        if reason := provider_class(job["provider"]).missing(torch.device(job["device"])):
            return {"status": "missing", "reason": reason}
        subject = _build(job)
        kinds = {"device": _device_job, "host": _host_job, "cpu": _cpu_job}
        return {"status": "ok"} | kinds[job["kind"]](subject, job)
    except (UnsupportedError, NotImplementedError) as error:
        return {"status": "unsupported", "reason": _first_line(error)}
    except oracle.WrongResultError as error:
        return {"status": "wrong", "reason": _first_line(error)}
    except torch.OutOfMemoryError as error:
        return {"status": "unsupported", "reason": f"out of memory: {_first_line(error)}"}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {_first_line(error)}"}


def _build(job: dict[str, Any]) -> Subject:
    """Refusals at construction are how a provider says what it lacks."""
    try:
        return Subject(job)
    except (AssertionError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        raise UnsupportedError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compiled_kernels() -> int:
    """Entries of Triton's cache on disk."""
    default = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    folder = Path(os.environ.get("TRITON_CACHE_DIR", default))
    return sum(1 for _ in folder.iterdir()) if folder.exists() else 0


def _checked_first_step(subject: Subject) -> dict[str, Any]:
    """Time the first forward and backward of the process, and hold their results against the oracle."""
    request = subject.requests[0]
    before = oracle.look_at(subject.provider, request)
    known = compiled_kernels()
    subject.wait()
    started = time.perf_counter()
    output = subject.provider.forward(request)
    subject.wait()
    middle = time.perf_counter()
    subject.backward(output)
    subject.wait()
    ended = time.perf_counter()
    first_call = {
        "forward_ms": round(1e3 * (middle - started), 2),
        "backward_ms": round(1e3 * (ended - middle), 2),
        "compiled": compiled_kernels() - known,
    }
    oracle.check(subject.provider, before, output, subject.grad)
    return {"first_call": first_call, "counts": limits.count(subject.workload, request).to_dict()}


def _device_job(subject: Subject, job: dict[str, Any]) -> dict[str, Any]:
    result = _checked_first_step(subject)
    _clean_up()
    subject.warm_up()
    try:
        forward, backward = profile_steps(subject.forward, subject.backward, subject.flush, job["repetitions"])
    except ProfileError as error:
        return result | {"reasons": {"gpu": str(error)}}
    both = [a + b for a, b in zip(forward.totals, backward.totals, strict=True)]
    result["measures"] = {
        "gpu_forward": stats(forward.totals), "gpu_backward": stats(backward.totals), "gpu_step": stats(both),
    }  # fmt: skip
    return result | {"kernels": {"forward": forward.kernels, "backward": backward.kernels}}


def _cpu_job(subject: Subject, job: dict[str, Any]) -> dict[str, Any]:
    if subject.workload.expected_entries < SMALL_ENTRIES:
        torch.set_num_threads(1)  # more would wait for each other
    result = _checked_first_step(subject)
    reason = "runs on the CPU" if torch.cuda.is_available() else "no GPU"
    reasons = dict.fromkeys(("gpu", "host", "graph", "memory"), reason)
    return result | {"measures": wall_times(subject, job["repetitions"]), "reasons": reasons}


def _host_job(subject: Subject, job: dict[str, Any]) -> dict[str, Any]:
    subject.warm_up()
    gc.collect()
    gc.disable()  # a collection inside a timed call would be charged to it
    try:
        measures = wall_times(subject, job["repetitions"])
        reasons: dict[str, str] = {}
        host, reason = host_times(subject, job["repetitions"])
        measures |= host
        if reason:
            reasons["host"] = reason
    finally:
        gc.enable()
    memory = peak_memory(subject)
    times, reason = _graph_times_or_reason(subject, job)
    if reason:
        reasons["graph"] = reason
    result = {"measures": measures | times, "memory": memory, "reasons": reasons}
    return result | {"capture_failed": bool(reason) and _may_capture(subject, job)}


def _may_capture(subject: Subject, job: dict[str, Any]) -> bool:
    return subject.provider.no_graph is None and "no_graph" not in job


def _graph_times_or_reason(subject: Subject, job: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A capture that fails leaves the process in a state that nothing more should be measured in."""
    if not _may_capture(subject, job):
        return {}, f"unsupported: {subject.provider.no_graph or job['no_graph']}"
    try:
        return graph_times(subject, job["repetitions"]), None
    except Exception as error:
        torch.cuda.set_stream(torch.cuda.default_stream())
        return {}, f"unsupported: {type(error).__name__}: {_first_line(error)}"


def _timed(subject: Subject, call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds from the call to the device done, on a cold L2."""
    subject.flush()
    subject.wait()
    started = time.perf_counter_ns()
    result = call()
    subject.wait()
    return (time.perf_counter_ns() - started) / 1e3, result


def wall_times(subject: Subject, repetitions: int) -> dict[str, Any]:
    """Eager wall time, forward and backward apart and as one step."""
    forward: list[float] = []
    backward: list[float] = []
    step: list[float] = []
    deadline = time.monotonic() + WALL_SECONDS
    for _ in range(repetitions):
        if len(step) >= 2 and time.monotonic() > deadline:
            break
        us, output = _timed(subject, subject.forward)
        forward.append(us)
        us, _ = _timed(subject, partial(subject.backward, output))
        backward.append(us)
        del output
        us, _ = _timed(subject, lambda: subject.backward(subject.forward()))
        step.append(us)
    return {"wall_forward": stats(forward), "wall_backward": stats(backward), "wall_step": stats(step)}


def _blocked(call: Callable[[], Any], cycles: int) -> tuple[float, Any, bool]:
    """Microseconds from the call to its return while the device is busy with something else; whether it still was
    when the call returned."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    busy = torch.cuda.Event()
    busy.record()
    started = time.perf_counter_ns()
    result = call()
    elapsed = (time.perf_counter_ns() - started) / 1e3
    blocked = not busy.query()
    torch.cuda.synchronize()
    return elapsed, result, blocked


def host_times(subject: Subject, repetitions: int) -> tuple[dict[str, Any], str | None]:
    """Time from call to return with the stream blocked, and why there is none: with the backward in autograd's thread,
    which is the default, and of a step also with the backward in the caller's."""
    cycles = BLOCK_CYCLES
    found, reason = _host_times(subject, repetitions, cycles)
    if reason:
        cycles *= 8
        found, reason = _host_times(subject, repetitions, cycles)
    if not reason:
        with torch.autograd.set_multithreading_enabled(False):
            one_thread, reason = _host_times(subject, repetitions, cycles)
        found |= {"host_step_one_thread": one_thread["host_step"]} if one_thread else {}
    return found, reason


def _host_times(subject: Subject, repetitions: int, cycles: int) -> tuple[dict[str, Any], str | None]:
    forward, backward, both = [], [], []
    for _ in range(repetitions):
        us_forward, output, first = _blocked(subject.forward, cycles)
        us_backward, _, second = _blocked(partial(subject.backward, output), cycles)
        del output
        if not (first and second):
            return {}, f"the {'backward' if first else 'forward'} waits for the device"
        forward.append(us_forward)
        backward.append(us_backward)
        both.append(us_forward + us_backward)
    return {"host_forward": stats(forward), "host_backward": stats(backward), "host_step": stats(both)}, None


def peak_memory(subject: Subject) -> dict[str, int]:
    """Bytes allocated at the peak beyond what stays: weights, state, the request, and the output."""

    def peak(call: Callable[[], Any], base: int, output_bytes: int) -> tuple[int, Any]:
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base - output_bytes, result

    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    size = subject.grad.numel() * subject.grad.element_size()
    forward, output = peak(subject.forward, base, size)
    kept = torch.cuda.memory_allocated() - base - size
    backward, _ = peak(partial(subject.backward, output), base, size)
    return {"forward": forward, "kept_for_backward": kept, "backward": backward, "step": max(forward, backward)}


def _capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _replay_times(subject: Subject, graph: torch.cuda.CUDAGraph, repetitions: int) -> dict[str, Any]:
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        subject.flush()
        torch.cuda._sleep(GRAPH_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return stats(times)


def graph_times(subject: Subject, repetitions: int) -> dict[str, Any]:
    """Time between events around a replay: the forward alone, and forward and backward in one graph."""
    request = subject.requests[0]

    def forward() -> Tensor:
        return subject.provider.forward(request)

    def step() -> Tensor:
        output = forward()
        subject.backward(output)
        return output.detach()

    graph, output = _capture(forward)
    graph.replay()
    if not torch.allclose(output, forward(), rtol=1e-5, atol=1e-5):
        raise RuntimeError("the replay differs from the eager forward")
    times = {"graph_forward": _replay_times(subject, graph, repetitions)}
    del graph, output
    graph, output = _capture(step)
    graph.replay()
    first = output.clone()
    graph.replay()
    if torch.equal(first, output):
        raise RuntimeError("a replay of forward and backward leaves the rows as they were")
    times["graph_step"] = _replay_times(subject, graph, repetitions)
    del graph, output
    return times
