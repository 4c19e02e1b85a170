"""The benchmark's files: workloads from files and recorded ones, results, reports, command line, occupancy."""

import importlib.util
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_cases import job_for, right_process, spread  # noqa: F401  (a fixture)

from bench import measure, traces
from bench import results as store
from bench.providers import PROVIDERS
from bench.workloads import WORKLOADS, Workload, make_requests, select
from fbtriton import SGD, Table, TableBatchedEmbeddingBags

CPU = torch.device("cpu")

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
    assert sum(row["kernel"] == "gather_kernel" for row in rows) == 2  # dims 4 and 8
    assert {"count_kernel", "pool_counts_kernel"} <= kernels  # dim 16, a small table
    for row in rows:
        assert row["spills"] < 32 and row["registers"] > 0 and 0 < row["resident_warps"] <= 64, row
    assert occupancy_table(rows, [90]).row_count


def test_the_page_of_predictions(tmp_path):
    """Between the ratio of bandwidths and that of warps under way, and refused without the fused kernel."""
    from bench import predict

    rows = [
        {"kernel": name, "arch": arch, "variant": f"DIM=128 CLC={int(arch >= 100)} REDUCE=0", "registers": 64,
         "spills": 0, "shared_bytes": 0, "resident_warps": warps}
        for name, arch, warps in [
            ("short_run_kernel", 90, 16), ("short_run_kernel", 100, 32), ("grad_accum_kernel", 90, 32),
            (predict.FUSED, 90, 32), (predict.FUSED, 100, 32),
        ]
    ]  # fmt: skip
    least, most = predict.predict([{"name": "short_run_kernel", "us": 100.0}, {"name": "other", "us": 10.0}], rows)
    assert least == pytest.approx(100 * 132 / 148 / 2 + 10 * 4.8 / 8)
    assert most == pytest.approx(100 * 4.8 / 8 + 10 * 132 / 148)

    occupancy, page = tmp_path / "occupancy.json", tmp_path / "page.md"
    occupancy.write_text(json.dumps(rows))
    least, most = predict.predict_fused({"grad_accum_kernel": 80.0, "apply_kernel": 20.0}, rows, 1.5)
    assert least == pytest.approx(80 * 4.8 / 8)
    assert most == pytest.approx(1.5 * (80 + 20) * 132 / 148)
    folder = store.RESULTS / "nvidia-h200"
    results, long_runs = max(folder.glob("*-41c1528.json")), max(folder.glob("tlx-*.json"))
    predict.write_page(results, occupancy, long_runs, page)
    assert "| mlperf-dlrmv2 |" in page.read_text()
    occupancy.write_text(json.dumps(rows[:3]))
    with pytest.raises(ValueError, match="occupancy must hold the fused kernel"):
        predict.write_page(results, occupancy, long_runs, page)


def test_the_page_on_blackwell_is_what_the_records_say(tmp_path):
    """`bench predict` of the files that the page names."""
    from bench import predict

    committed = (store.ROOT / "bench" / "b200.md").read_text()
    folder, compiled = store.RESULTS / "nvidia-h200", store.RESULTS / "compiled"
    results, occupancy, long_runs = re.findall(r"`([\w-]+\.json)`", committed)
    predict.write_page(folder / results, compiled / occupancy, folder / long_runs, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == committed


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, store.ROOT / "tools" / f"{name}.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_record_of_long_runs():
    """What pytest printed is read, and the page is what its data says, but for the notes."""
    tlx_record = load_tool("tlx_record")
    printed = (
        "71.27s call     tests/test_tlx.py::test_contention[128-torch.float16-1-slots]\n"
        "5.98s setup    tests/test_tlx.py::test_contention[64-torch.float32-1-reduce]\n"
        "18 passed, 18 skipped in 187.24s (0:03:07)\n"
    )
    assert tlx_record.outcome(printed) == "18 passed, 18 skipped"
    assert tlx_record.cases(printed) == {"slots": 1}
    for data in (store.RESULTS / "nvidia-h200").glob("tlx-*.json"):
        text = data.with_suffix(".md").read_text()
        assert text.startswith(tlx_record.page(json.loads(data.read_text()), data.name) + f"\n{tlx_record.NOTES}\n")


def test_sizes_of_long_runs():
    """Two features of one table, and one of another: ids 0 of the tables are different rows."""
    from bench.fused import long_run_sizes
    from bench.workloads import Request, Workload

    workload = Workload("sizes", (5, 5), (8, 8), 2, (50,) * 3, "", feature_tables=(0, 0, 1))
    indices = torch.tensor([0] * 50 + [1] * 31 + [0] * 40 + [2] * 31 + [0] * 300)
    sizes = long_run_sizes(workload, Request(indices, torch.tensor([0, 50, 81, 121, 152, 452, 452]), None))
    # The sorted entries of the long runs are [0, 90) and [152, 452); cuts are at 256 and 384.
    assert sizes == {"ids": 452, "in long runs": 390, "long runs": 2, "pieces": 4}


def test_what_compute_sanitizer_printed():
    """Of several processes; a tool that said nothing, or tests that failed, are not clean."""
    sanitize = load_tool("sanitize")
    clean = "== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n4 passed, 2 skipped in 3.10s\n"
    assert sanitize.read_output(clean) == {"found": 0, "tests": "4 passed, 2 skipped"}
    assert sanitize.is_clean(sanitize.read_output(clean))
    several = "1 failed, 3 passed in 1.00s\n== ERROR SUMMARY: 2 errors\n== ERROR SUMMARY: 1 error\n"
    assert sanitize.read_output(several) == {"found": 3, "tests": "1 failed, 3 passed"}
    for text in (several, "4 passed in 3.10s\n", "== ERROR SUMMARY: 0 errors\n", clean.replace("4 passed", "1 failed"),
                 clean.replace("2 skipped", "1 error")):  # fmt: skip
        assert not sanitize.is_clean(sanitize.read_output(text))
