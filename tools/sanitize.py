"""Run tests on a GPU under NVIDIA's compute-sanitizer, and record what its tools found: make sanitize

    python tools/sanitize.py --out sanitizer.json tests/test_tlx.py -k lengths

What follows the options goes to pytest. Every tensor gets memory of its own, so that an access past its end leaves the
memory too. Tests that capture graphs cannot run that way.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.results import pytest_outcomes

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {
    "memcheck": "accesses outside of memory, or not aligned",
    "racecheck": "races of threads in shared memory",
    "synccheck": "barriers that not all threads reach",
    "initcheck": "reads of memory that nobody wrote",
}
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}  # libraries ask the driver for entry points that it lacks
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)


def read_output(text: str) -> dict[str, Any]:
    """What the tool counted in all processes, None where it said nothing, and what pytest did."""
    counts = SUMMARY.findall(text)
    outcomes = pytest_outcomes(text)
    return {"found": sum(map(int, counts)) if counts else None, "tests": outcomes[-1] if outcomes else "did not finish"}


def is_clean(result: dict[str, Any]) -> bool:
    return result["found"] == 0 and "passed" in result["tests"] and not re.search("failed|error", result["tests"])


def run(tool: str, arguments: list[str]) -> dict[str, Any]:
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    options = OPTIONS.get(tool, [])
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", *options, *pytest]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    result = read_output(done.stdout)
    if not is_clean(result):
        print(done.stdout[-20_000:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all, one after the other")
    parser.add_argument("--out", type=Path, help="the record, JSON")
    args, arguments = parser.parse_known_args()
    if not torch.cuda.is_available() or not shutil.which("compute-sanitizer"):
        sys.exit("needs a CUDA GPU, and compute-sanitizer of the CUDA toolkit on PATH")
    results = {tool: run(tool, arguments) for tool in args.tool or TOOLS}
    record = {"gpu": torch.cuda.get_device_name(), "pytest": " ".join(arguments), "tools": results}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    table = Table(title=f"compute-sanitizer on {record['gpu']}: pytest {record['pytest']}")
    for name in ("tool", "looks for", "found", "tests"):
        table.add_column(name)
    for tool, result in results.items():
        table.add_row(tool, TOOLS[tool], str(result["found"]), result["tests"])
    Console(width=110).print(table)
    sys.exit(not all(map(is_clean, results.values())))


if __name__ == "__main__":
    main()
