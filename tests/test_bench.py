"""The benchmark itself: it judges providers rightly, counts what it says it counts, and runs at tiny sizes."""

import json
import sys

import pytest
import torch
from bench_cases import job_for, right_process, spread  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from bench import cli, device_time, interleaved, limits, measure, oracle, runner
from bench import results as store
from bench.device_time import DeviceEvent, ProfileError, device_events, short_name, split_calls, summarise
from bench.pool import Worker
from bench.providers import PROVIDERS, Fbtriton
from bench.workloads import WORKLOADS, Request, Workload, make_request, make_requests, select

CPU = torch.device("cpu")
TINY = [workload.name for workload in select(None, "tiny")]


# Workloads


def test_workloads_survive_json():
    for workload in WORKLOADS.values():
        assert Workload.from_dict(json.loads(json.dumps(workload.to_dict()))) == workload
        assert workload.source


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("name", TINY)
def test_requests_are_valid_and_repeatable(name, ids):
    workload = WORKLOADS[name]
    first, second = make_requests(workload, 2, seed=3, device=CPU, ids=ids)
    again = make_requests(workload, 2, seed=3, device=CPU, ids=ids)
    assert torch.equal(first.indices, again[0].indices) and not torch.equal(first.indices, second.indices)
    assert first.indices.dtype == first.offsets.dtype == getattr(torch, ids)
    assert first.offsets.numel() == sum(workload.samples) + 1 and first.offsets[-1] == first.indices.numel()
    for entries in oracle.entries_of(workload, first):
        assert ((entries.rows >= 0) & (entries.rows < workload.rows[entries.table])).all()


def test_skewed_ids_repeat_more():
    distinct = []
    for alpha in (1.0, 1.1, 1.3):
        workload = Workload("skew", (10_000,), (4,), 1000, (10,), "", alpha=alpha)
        distinct.append(make_request(workload, 0, CPU, torch.int64).indices.unique().numel())
    assert distinct[0] > 1.3 * distinct[1] > 1.3 * 1.3 * distinct[2]


def test_select():
    assert [workload.name for workload in select(["tiny*"])] == TINY
    with pytest.raises(ValueError, match="no workload is named 'tinny'"):
        select(["tinny"])


# The byte model


def test_byte_model_by_hand():
    """Table A of 100 rows is sorted, table B of 10 rows is counted."""
    workload = Workload("hand", (100, 10), (4, 8), 2, (1.5, 2), "")
    indices = torch.tensor([1, 1, 2, 3, 3, 3, 4])
    offsets = torch.tensor([0, 2, 3, 5, 7])
    counts = limits.count(workload, Request(indices, offsets, None))
    assert counts == limits.Counts(entries=[3, 4], distinct=[2, 2], bags=4)
    rows = 2 * 4 * 2 + 2 * 8 * 2  # distinct rows x dim x 2 bytes
    output = 2 * (4 + 8) * 4
    assert limits.byte_model(workload, counts, "int64")["forward"] == rows + output + 8 * (7 + 5)
    assert limits.byte_model(workload, counts, "int32")["forward"] == rows + output + 4 * (7 + 5)
    assert limits.sort_passes(workload) == 1  # 7 bits
    sort = 3 * (8 + 4 + 4 + 4 + 16)
    runs = 3 * 8 + 2 * 20
    update = output + 2 * rows + 4 * 64 + 3 * 4 + 2 * 20
    counted = 2 * 10  # one byte for each row and bag, less than 4 ids of 8 bytes
    assert limits.byte_model(workload, counts, "int64")["backward"] == sort + runs + update + counted
    assert limits.byte_model(workload, counts, "int64")["lookup"] == (3 * 4 + 4 * 8) * 2 + output + 8 * 12
    assert limits.byte_model(workload, counts, "int64")["gradient"] == (3 * 4 + 4 * 8) * 4
    assert limits.floor_us(4_000_000, 4e12) == 1.0 and limits.floor_us(1, None) is None


# GPU time from a profile


def trace_event(name, start, duration, kind="kernel"):
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration}


MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def test_only_device_activity_counts():
    """Ranges of operators and users on the device's track span kernels that are there themselves."""
    events = device_events(
        {
            "traceEvents": [
                trace_event("kernel_b", 5.0, 2.0),
                trace_event("kernel_a", 1.0, 3.0),
                trace_event("Memset (Device)", 9.0, 0.5, "gpu_memset"),
                trace_event("Memcpy DtoD (Device -> Device)", 10.0, 0.25, "gpu_memcpy"),
                trace_event("fbgemm::bounds_check_indices", 1.0, 9.0, "gpu_user_annotation"),
                trace_event("fbgemm::forward", 0.0, 20.0, "cpu_op"),
                trace_event("cudaLaunchKernel", 0.0, 1.0, "cuda_runtime"),
                {"ph": "i", "cat": "kernel", "name": "instant", "ts": 2.0},
                {"ph": "M", "name": "process_name"},
            ]
        }
    )
    assert [event.name[:8] for event in events] == ["kernel_a", "kernel_b", "Memset (", "Memcpy D"]
    assert sum(event.duration for event in events) == 5.75


def timeline(*names):
    return [DeviceEvent(name, float(i), 1.0) for i, name in enumerate(names)]


def test_calls_lie_between_their_markers():
    flush = "Memset (Device)"
    events = timeline(
        "early", flush, MARK, "warm", MARK, flush, MARK, "gather", "fill", MARK, flush, MARK, "sort", MARK, "late"
    )
    calls = split_calls(events, 2, MARK)
    assert [[event.name for event in call] for call in calls] == [["gather", "fill"], ["sort"]]
    with pytest.raises(ProfileError, match="6 markers"):
        split_calls(events, 4, MARK)
    with pytest.raises(ProfileError):
        summarise([[], []])


def test_kernel_split():
    calls = [[DeviceEvent("a", 0, 3.0), DeviceEvent("b", 4, 1.0), DeviceEvent("b", 6, 2.0)], [DeviceEvent("b", 9, 5.0)]]
    profile = summarise(calls)
    assert profile.totals == [6.0, 5.0]
    assert profile.kernels == [
        {"name": "b", "us": 4.0, "launches": 1.5},
        {"name": "a", "us": 1.5, "launches": 0.5},
    ]


def test_short_names():
    onesweep = "void cub::CUB_300001_SM_900::detail::radix_sort::DeviceRadixSortOnesweepKernel<cub::P<int, 8>, 1>(int*)"
    fill = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)"
    )
    assert short_name(onesweep) == "DeviceRadixSortOnesweepKernel"
    assert short_name(fill) == "vectorized_elementwise_kernel Fill"
    assert short_name("gather_kernel") == "gather_kernel"
    assert short_name(MARK) == "spin_kernel"
    assert short_name("Memset (Device)") == "Memset Device"


# Providers and the oracle


@pytest.mark.parametrize("provider", list(PROVIDERS))
@pytest.mark.parametrize("name", TINY)
def test_providers_on_tiny_workloads(name, provider):
    """Right and timed, or a reason."""
    result = measure.run_job(job_for(WORKLOADS[name], provider))
    reasons = {
        ("tiny-odd", "fbgemm"): "multiple of 4",
        ("tiny-weighted", "embedding-bag"): "Half",  # PyTorch cannot add sparse fp16 gradients on a CPU
    }
    expected = reasons.get((name, provider))
    if provider == "fbgemm" and result["status"] == "missing":
        assert "fbgemm_gpu" in result["reason"]
    elif expected and provider != "embedding-bag" or result["status"] != "ok":
        assert result["status"] == "unsupported" and expected in result["reason"], result
    else:
        assert result["measures"]["wall_step"]["median"] > 0
        assert result["reasons"]["gpu"] == "no GPU" or torch.cuda.is_available()
        assert sum(result["counts"]["entries"]) > 0


@pytest.mark.interpreter
def test_kernels_on_a_tiny_workload():
    cuda = torch.cuda.is_available()
    result = measure.run_job(
        job_for(WORKLOADS["tiny"], "fbtriton", "device" if cuda else "cpu", device="cuda" if cuda else "cpu")
    )
    assert result["status"] == "ok", result


class Faulty(Fbtriton):
    """The right result, then one thing wrong."""

    fault = ""

    def forward(self, request):
        output = super().forward(request)
        if self.fault == "output":
            output = output + torch.nn.functional.one_hot(torch.tensor(5), output.shape[1]) * 1e-3
        if self.fault == "nan":
            output = output.masked_fill(torch.arange(output.shape[1]) == 5, float("nan"))
        return output[:, :-1] if self.fault == "shape" else output

    def backward(self, output, grad):
        if self.fault == "no update":
            return
        super().backward(output, grad[:, : output.shape[1]])
        table, state = self.tables()[0], self.states()[0]
        touched = (state > 0).nonzero().flatten()
        if self.fault == "weights":
            table[touched[-1], -1] += 0.01
        if self.fault == "state":
            state[touched[0]] *= 1.001
        if self.fault == "other rows":
            beside = (state == 0) & ((state.roll(1) > 0) | (state.roll(-1) > 0))
            table[beside.nonzero()[1]] += 0.5


@pytest.mark.parametrize("name", ["tiny", "tiny-weighted"])
@pytest.mark.parametrize(
    "fault", ["", "output", "nan", "shape", "no update", "weights", "state", "other rows"], ids=lambda f: f or "none"
)
def test_wrong_provider_gets_no_time(monkeypatch, fault, name):
    monkeypatch.setitem(PROVIDERS, "fbtriton", Faulty)
    monkeypatch.setattr(Faulty, "fault", fault)
    result = measure.run_job(job_for(WORKLOADS[name], "fbtriton"))
    assert result["status"] == ("wrong" if fault else "ok"), result
    assert ("measures" in result) == (not fault)


def test_crash_is_a_result():
    job = job_for(WORKLOADS["tiny"], "fbtriton", kind="no such kind")
    assert measure.run_job(job)["status"] == "failed"


def test_worker_that_dies(monkeypatch):
    worker = Worker("fbtriton")
    worker.close()
    worker.command = [sys.executable, "-c", "import sys; print('went wrong', file=sys.stderr); sys.exit(3)"]
    result = worker.run({}, timeout=60)
    assert result["status"] == "failed" and "code 3" in result["reason"]
    worker.command = [sys.executable, "-c", "import time; time.sleep(60)"]
    result = worker.run({}, timeout=0.2)
    assert result["status"] == "failed" and "longer than" in result["reason"]
    assert worker.process.poll() is not None


# What runs only on a GPU, with a stand-in for the device


class StandIn:
    """Enough of torch.cuda to run every statement; events say that the device is busy and that 1 ms went by."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def query(self):
        return False

    def elapsed_time(self, other):
        return 1.0

    synchronize = wait_stream = replay = record

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


@pytest.fixture
def stand_in(monkeypatch):
    for name in ("Event", "Stream", "CUDAGraph", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, StandIn)
    for name in ("current_stream", "default_stream", "synchronize", "reset_peak_memory_stats", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: StandIn())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)


def test_host_job(stand_in):
    """Replays of the stand-in do nothing, which is noticed."""
    result = measure.run_job(job_for(WORKLOADS["tiny"], "fbtriton", "host"))
    assert result["status"] == "ok", result
    host = {"host_forward", "host_backward", "host_step", "host_step_one_thread"}
    assert {"wall_step"} | host <= set(result["measures"])
    assert result["capture_failed"] and "leaves the rows" in result["reasons"]["graph"]
    output = WORKLOADS["tiny"].batch * sum(WORKLOADS["tiny"].dims) * 4
    assert result["memory"]["step"] == 4000 - output


def test_interleaved_modes(monkeypatch):
    """Modes in turn on every request; medians of kernels, of their groups and of all."""
    called = []

    def profile(calls, flush):
        for number, call in enumerate(calls):
            call()
            us = 1.0 + number // 2  # the n-th call of each mode
            yield [DeviceEvent("a_kernel", 0, us), DeviceEvent("b_kernel", 0, 10.0), DeviceEvent("b_kernel", 0, 1.0)]

    monkeypatch.setattr(interleaved, "profile_calls", lambda calls, flush: list(profile(calls, flush)))
    requests = make_requests(WORKLOADS["tiny"], 3, 1, torch.device("cpu"), "int32")
    modes = {name: lambda request, name=name: called.append((name, request)) for name in ("one", "two")}
    times = interleaved.kernel_times(modes, requests, {"both": ("a_kernel", "b_kernel", "not there")})
    assert times["one"] == times["two"] == {"a_kernel": 3.5, "b_kernel": 11.0, "both": 14.5, "all": 14.5}
    turns = [(name, request) for _ in range(interleaved.REPETITIONS) for request in requests for name in modes]
    expected = [("one", requests[0]), ("two", requests[0]), *turns]
    assert [(name, id(request)) for name, request in called] == [(name, id(request)) for name, request in expected]


@pytest.mark.parametrize("command", ["checks", "counted", "fused", "tune"])
def test_commands_that_need_a_gpu_say_so(command):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(cli.app, [command])
    assert result.exit_code == 2 and "needs a GPU" in result.output


def test_graph_is_not_tried_again(stand_in):
    result = measure.run_job(job_for(WORKLOADS["tiny"], "fbtriton", "host", no_graph="it failed"))
    assert not result["capture_failed"] and result["reasons"]["graph"] == "unsupported: it failed"


def test_host_time_of_a_call_that_waits(stand_in, monkeypatch):
    monkeypatch.setattr(StandIn, "query", lambda self: True)
    result = measure.run_job(job_for(WORKLOADS["tiny"], "fbtriton", "host"))
    assert "host_step" not in result["measures"] and "waits for the device" in result["reasons"]["host"]


def test_device_job(stand_in, monkeypatch):
    """A profile in which the forward has one kernel of 2 us and the backward two of 3 us."""
    names = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: names.append(MARK))
    forward, backward = measure.Subject.forward, measure.Subject.backward
    monkeypatch.setattr(measure.Subject, "forward", lambda self: (names.append("gather"), forward(self))[1])
    monkeypatch.setattr(
        measure.Subject, "backward", lambda self, output: (names.extend(["run", "run"]), backward(self, output))[1]
    )

    def trace(run, activities):
        names.clear()
        run()
        durations = {"gather": 2.0, "run": 3.0}
        return {"traceEvents": [trace_event(name, i, durations.get(name, 9.0)) for i, name in enumerate(names)]}

    monkeypatch.setattr(device_time, "_trace", trace)
    device_time._calibrate.cache_clear()
    result = measure.run_job(job_for(WORKLOADS["tiny"], "fbtriton", "device"))
    device_time._calibrate.cache_clear()
    assert result["status"] == "ok", result
    medians = {name: value["median"] for name, value in result["measures"].items()}
    assert medians == {"gpu_forward": 2.0, "gpu_backward": 6.0, "gpu_step": 8.0}
    assert result["kernels"]["backward"] == [{"name": "run", "us": 6.0, "launches": 2.0}]


# A run


class FakePool:
    """Answers jobs: bounds check v2 is faster, nothing runs on one workload, captures of FBGEMM fail."""

    def __init__(self, base=None):
        self.jobs = []
        FakePool.last = self

    def prepare(self, provider, role):
        pass

    def close(self):
        pass

    def run(self, job, timeout):
        self.jobs.append(job)
        if job["kind"] == "limits":
            return {"status": "ok", "copy_bandwidth": {"median": 4e12, "low": 4e12, "high": 4e12}}
        if job["kind"] == "host":
            failed = job["provider"] == "fbgemm" and "no_graph" not in job
            reasons = {"graph": "unsupported: a copy"} if failed else {}
            measures = {"host_step": spread(50.0)}
            return {"status": "ok", "measures": measures, "reasons": reasons, "capture_failed": failed}
        if job["workload"]["name"] == "tiny-odd" and job["provider"] == "fbgemm":
            return {"status": "unsupported", "reason": "multiple of 4"}
        us = {"v1": 30.0, "v2": 20.0, "": 10.0}[job["setting"]]
        measures = {f"gpu_{name}": spread(us) for name in store.DIRECTIONS}
        return {
            "status": "ok",
            "measures": measures,
            "reasons": {},
            "counts": {"entries": [1] * 3, "distinct": [1] * 3, "bags": 3},
        }


def run_fake(monkeypatch, tmp_path, **options):
    monkeypatch.setattr(runner, "Pool", FakePool)
    workloads = select(["tiny", "tiny-odd", "tiny-weighted", "tiny-vbe"])
    given = {"workloads": workloads, "providers": ["fbtriton", "fbgemm"], "ids": ["int32", "int64"], "gpu": True}
    chosen = runner.Options(**given | {"out": tmp_path / "result.json"} | options)
    results = store.new_results("abc", chosen.describe(), workloads)
    labels = []
    runner.run(chosen, results, lambda done, total, step, record: labels.append((done, total, step.label)))
    assert labels[-1][0] == labels[-1][1]
    return store.load(tmp_path / "result.json"), FakePool.last.jobs


def test_run_on_a_gpu(monkeypatch, tmp_path):
    results, jobs = run_fake(monkeypatch, tmp_path)
    kinds = [job["kind"] for job in jobs]
    assert kinds[0] == "limits" and kinds.count("device") == 4 * 2 * 3
    host = [(job["workload"]["name"], job["provider"], job["setting"]) for job in jobs if job["kind"] == "host"]
    assert ("tiny", "fbgemm", "v2") in host and ("tiny", "fbgemm", "v1") not in host
    assert not any(name == "tiny-odd" and provider == "fbgemm" for name, provider, _ in host)
    tried = [job for job in jobs if job["kind"] == "host" and job["provider"] == "fbgemm" and "no_graph" not in job]
    assert len(tried) == runner.MAX_CAPTURE_FAILURES
    (odd,) = store.records(results, workload="tiny-odd", provider="fbgemm", ids="int32", setting="v1")
    assert odd["status"] == "unsupported" and odd["reason"] == "multiple of 4"
    assert store.speedup(results, "tiny", "forward") == (2.0, "int32")
    assert store.speedup(results, "tiny", "step", kind="host", ids="int64") == (1.0, "int64")
    assert store.speedup(results, "tiny-odd", "forward") is None


def test_time_limit_is_said(monkeypatch, tmp_path):
    results, jobs = run_fake(monkeypatch, tmp_path, time_limit=-1.0)
    assert len(jobs) == 1 and results["records"]
    assert all(r["status"] == "skipped" and "time limit" in r["reason"] for r in results["records"])


def test_noise():
    assert store.is_noise(spread(100.0), spread(102.9)) and not store.is_noise(spread(100.0), spread(103.1))
    assert store.is_noise(spread(10.0), spread(11.9)) and not store.is_noise(spread(10.0), spread(12.1))
