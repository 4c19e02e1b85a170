"""`python -m fbtriton info`: versions, and the routes of a workload file."""

import json
import subprocess
import sys

import pytest


def info(*arguments):
    command = [sys.executable, "-m", "fbtriton", "info", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_versions_and_routes():
    text = info().stdout
    for name in ("fbtriton", "torch", "Triton", "GPU", "sort", "paths for fp16 tables"):
        assert name in text


def test_routes_of_a_workload(tmp_path):
    """Bags in the file are hints: the two small tables with long bags are counted, the others gathered."""
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"rows": [64, 48, 50, 10**6], "dims": [128, 64, 128, 128], "bags": [200, 200, 3, 10]}))
    lines = info("--workload", path, "--gpu", "NVIDIA H200").stdout.splitlines()
    assert lines[0].startswith("w.json on NVIDIA H200, 103.25 ids a bag on average")
    assert lines[1].startswith("forward histogram: features 0, 1: at most")
    assert lines[2].startswith("forward gather: features 2, 3: dim 128; 4 bags a program")
    assert lines[3] == "backward histogram: features 0, 1: counted by the forward; no sort"


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "--workload must be a file that can be read"),
        ({"rows": [1]}, "must give rows and dims"),
        ({"rows": [1], "dims": [4], "colour": 3}, "has unknown keys colour"),
        ({"rows": [1], "dims": [4], "dtype": "int8"}, "must be one of fp32, fp16, bf16, got 'int8'"),
        ({"rows": [1], "dims": [4], "bags": [1, 2]}, "must have one entry for each of 1 features, got 2"),
        ({"rows": [1], "dims": [4], "feature_tables": [1]}, "must be table numbers in [0, 1)"),
    ],
)
def test_errors(content, message, tmp_path):
    path = tmp_path / "w.json"
    if content is not None:
        path.write_text(json.dumps(content))
    result = info("--workload", path)
    assert result.returncode == 2 and message in result.stderr
