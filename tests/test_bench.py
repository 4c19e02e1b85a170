"""The benchmark itself: it judges providers rightly, counts what it says it counts, and runs at tiny sizes."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import device_time, limits, measure, oracle, runner, traces
from bench import results as store
from bench.device_time import DeviceEvent, ProfileError, device_events, short_name, split_calls, summarise
from bench.pool import Worker
from bench.providers import PROVIDERS, Fbtriton
from bench.workloads import WORKLOADS, Request, Workload, make_request, make_requests, select
from fbtriton import SGD, Table, TableBatchedEmbeddingBags
from fbtriton.config import INTERPRET

CPU = torch.device("cpu")
TINY = [workload.name for workload in select(None, "tiny")]


@pytest.fixture(autouse=True)
def right_process(request):
    if INTERPRET and not torch.cuda.is_available() and not request.node.get_closest_marker("interpreter"):
        pytest.skip("runs in the process without TRITON_INTERPRET")


def job_for(workload, provider, kind="cpu", **other):
    job = {"kind": kind, "workload": workload.to_dict(), "provider": provider, "ids": "int64", "setting": ""}
    job["setting"] = PROVIDERS[provider].settings[-1]
    return job | {"device": "cpu", "requests": 2, "repetitions": 2, "seed": 1} | other


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
    assert {"wall_step", "host_forward", "host_backward", "host_step"} <= set(result["measures"])
    assert result["capture_failed"] and "leaves the rows" in result["reasons"]["graph"]
    output = WORKLOADS["tiny"].batch * sum(WORKLOADS["tiny"].dims) * 4
    assert result["memory"]["step"] == 4000 - output


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


def spread(value, share=0.01):
    return {"median": value, "low": value * (1 - share), "high": value * (1 + share), "n": 5}


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


# Workloads from files, and recorded ones


def test_yaml_workload(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text("rows: [30, 20]\ndims: 8\nbatch: 4\nbags: [2, 3]\ndtype: fp32\nalpha: 1.2\n")
    workload = traces.load_workload(path)
    assert workload.name == "mine" and workload.dims == (8, 8) and workload.bags == (2, 3)
    assert measure.run_job(job_for(workload, "fbtriton"))["status"] == "ok"
    path.write_text("tables: 2\nrows: 30\ndims: 8\nbatch: 4\nbags: 2\nalphas: 3\n")
    with pytest.raises(ValueError, match="alphas"):
        traces.load_workload(path)


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_trace_beside_a_json_workload(tmp_path, suffix):
    requests = [{"indices": torch.tensor([1, 2, 3 + i]), "offsets": torch.tensor([0, 1, 1, 2, 3])} for i in range(2)]
    if suffix == ".pt":
        torch.save(requests, tmp_path / "ids.pt")
    else:
        arrays = {f"{name}_{i}": value.numpy() for i, request in enumerate(requests) for name, value in request.items()}
        np.savez(tmp_path / "ids.npz", **arrays)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"rows": [9, 9], "dims": 4, "dtype": "fp32", "trace": f"ids{suffix}"}))
    workload = traces.load_workload(path)
    assert workload.batch == 2 and not workload.weighted
    read = make_requests(workload, 8, 0, CPU, "int32")
    assert [request.indices.tolist() for request in read] == [[1, 2, 3], [1, 2, 4]]
    assert measure.run_job(job_for(workload, "fbtriton"))["status"] == "ok"


@pytest.mark.parametrize("weighted", [False, True])
def test_record_and_replay(tmp_path, weighted):
    from bench import record

    module = TableBatchedEmbeddingBags(
        [Table(20, 4), Table(30, 8)], optimizer=SGD(0.1), feature_table_map=[0, 1, 1], device="cpu"
    )
    model = torch.nn.Sequential(module)
    source = Workload("s", (20, 30), (4, 8), 5, (2, 3, 1), "", (0, 1, 1), "fp32", weighted=weighted)
    requests = make_requests(source, 3, 0, CPU, "int64")
    path = tmp_path / "live.npz"
    with record(module, path, limit=2) as recording:
        for request in requests:
            model[0](*request)
    module(*requests[0])  # no longer recorded
    assert len(recording.requests) == 2
    replayed = traces.load_workload(path)
    assert (replayed.name, replayed.rows, replayed.dims, replayed.batch) == ("live", (20, 30), (4, 8), 5)
    assert replayed.feature_tables == (0, 1, 1) and replayed.weighted == weighted and replayed.dtype == "fp32"
    for read, given in zip(make_requests(replayed, 8, 0, CPU, "int64"), requests[:2], strict=True):
        assert torch.equal(read.indices, given.indices) and torch.equal(read.offsets, given.offsets)
        assert (read.sample_weights is None) == (not weighted)
    assert measure.run_job(job_for(replayed, "fbtriton"))["status"] == "ok"


def test_record_of_fbgemm(tmp_path):
    from bench import record

    if PROVIDERS["fbgemm"].missing(CPU):
        pytest.skip("needs fbgemm_gpu, which is not installed")
    subject = measure.Subject(job_for(WORKLOADS["tiny-vbe"], "fbgemm"))
    with record(subject.provider.module, tmp_path / "vbe.npz"):
        subject.forward()
    assert traces.load_workload(tmp_path / "vbe.npz").batch_sizes == (8, 3)
    with pytest.raises(ValueError, match="record needs a TBE"), record(torch.nn.Linear(1, 1), tmp_path / "x.npz"):
        pass


# Reports and the command line


def synthetic_results():
    """Times of three workloads and a sweep; FBGEMM lacks one, fbtriton is wrong on another."""
    workloads = [*select(["fbgemm-default", "odd-dims", "vbe"]), *select(None, "scaling")]
    results = store.new_results("abc", {}, workloads)
    results["machine"] = {
        "name": "NVIDIA H200",
        "slug": "nvidia-h200",
        "gpu": True,
        "clocks_before": {"clocks.sm": "9"},
    }
    results |= {"copy_bandwidth": spread(4e12), "seconds": 1.0}
    for number, workload in enumerate(workloads):
        for provider, factor in (("fbtriton", 10.0), ("fbgemm", 18.0)):
            for setting in PROVIDERS[provider].settings:
                record = store.record_of(results, workload.name, provider, "int32", setting)
                if (workload.name, provider) == ("odd-dims", "fbgemm"):
                    record |= {"status": "unsupported", "reason": "embedding_dim must be a multiple of 4"}
                elif (workload.name, provider) == ("vbe", "fbtriton"):
                    record |= {"status": "wrong", "reason": "forward, feature 3: 7 of 9 elements differ"}
                else:
                    fill_record(record, workload, factor * (number + 3))
    return results


def fill_record(record, workload, us):
    record["measures"] = {
        f"{kind}_{name}": spread(us * (1 + i)) for kind in ("gpu", "wall", "host", "graph")
        for i, name in enumerate(store.DIRECTIONS)
    }  # fmt: skip
    kernels = [{"name": f"kernel_{i}", "us": us / 2**i, "launches": 1} for i in range(10)]
    record["kernels"] = {"forward": kernels[:3], "backward": kernels}
    tables = len(workload.rows)
    record["counts"] = {"entries": [1000] * tables, "distinct": [500] * tables, "bags": 100 * tables}
    record["memory"] = {"step": 10**6}
    record["first_call"] = {"forward_ms": 900.0, "backward_ms": 1000.0, "compiled": 7}


def test_report(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib (the bench extra)")
    from bench.report import write_report

    written = write_report([synthetic_results()], ["a.json"], tmp_path)
    names = {path.name for path in written}
    plots = {"speedup.png", "roofline.png", "kernels-forward.png", "kernels-backward.png", "scaling.png"}
    assert names == plots | {"README.md"}
    for name in plots:
        picture = image.imread(tmp_path / name)
        assert min(picture.shape[:2]) > 250 and picture[..., :3].std() > 0.05, name
    text = (tmp_path / "README.md").read_text()
    assert "| fbgemm-default | 1.80 (int32)" in text and "**geometric mean**" in text
    assert "WRONG: forward, feature 3" in text and "embedding_dim must be a multiple of 4 (odd-dims)" in text
    assert text.count("![") == len(plots)


def test_merge_replaces_records():
    first, second = synthetic_results(), synthetic_results()
    second["records"] = [store.records(second, workload="fbgemm-default", provider="fbtriton")[0]]
    second["records"][0]["measures"]["gpu_forward"]["median"] = 1.0
    merged = store.merge([first, second])
    assert len(merged["records"]) == len(first["records"])
    assert store.median(store.records(merged, workload="fbgemm-default", provider="fbtriton")[0], "gpu_forward") == 1.0
    second["machine"] = second["machine"] | {"name": "another"}
    with pytest.raises(ValueError, match="different GPUs"):
        store.merge([first, second])


def invoke(*arguments):
    testing = pytest.importorskip("typer.testing", reason="needs typer (the bench extra)")
    from bench.cli import app

    result = testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    return SimpleNamespace(code=result.exit_code, text=result.output)


def test_command_line(tmp_path):
    """`run`, then `compare` and `report` of what it wrote."""
    out = tmp_path / "cpu.json"
    run = invoke("run", "--workload", "tiny", "--provider", "fbtriton", "--quick", "--out", out, "--commit", "abc")
    assert run.code == 0, run.text
    results = store.load(out)
    assert results["commit"] == "abc" and results["versions"]["torch"] == torch.__version__
    assert {record["status"] for record in results["records"]} == {"ok"}
    if not torch.cuda.is_available():
        assert "no GPU" in run.text
    assert "noise" in invoke("compare", out, out).text
    assert invoke("report", out, "--out", tmp_path / "report").code == 0
    assert "tiny" in (tmp_path / "report" / "README.md").read_text()


def test_command_line_says_what_is_wrong(tmp_path):
    assert invoke("list").code == 0
    for arguments in (["--workload", "nope"], ["--provider", "nope"], ["--ids", "int8"], ["--workload", "no.yaml"]):
        assert invoke("run", *arguments).code == 2
    assert invoke("run", "--base", tmp_path).code == 2


# Occupancy


def test_resident_warps():
    pytest.importorskip("rich", reason="needs rich (the bench extra)")
    from bench.occupancy import MULTIPROCESSORS, resident_warps

    hopper = MULTIPROCESSORS[90]
    assert resident_warps(32, 0, 4, hopper) == 64
    assert resident_warps(32, 0, 1, hopper) == 32  # 32 CTAs
    assert resident_warps(65, 0, 4, hopper) == 28  # 72 registers a thread: 7 warps in each of 4 partitions
    assert resident_warps(255, 0, 8, hopper) == 8
    assert resident_warps(32, 100 * 1024, 4, hopper) == 8  # two CTAs


@pytest.mark.compile
def test_occupancy_of_a_tiny_workload(tmp_path):
    pytest.importorskip("rich", reason="needs rich (the bench extra)")
    from bench.occupancy import examine, occupancy_table

    rows = examine(select(["tiny", "tiny"]), [90], ["int64"])
    kernels = {row["kernel"] for row in rows}
    assert {"gather_kernel", "short_run_kernel", "apply_kernel"} <= kernels
    assert sum(row["kernel"] == "gather_kernel" for row in rows) == 3  # dims 4, 8 and 16
    for row in rows:
        assert row["spills"] == 0 and row["registers"] > 0 and 0 < row["resident_warps"] <= 64, row
    assert occupancy_table(rows, [90]).row_count
