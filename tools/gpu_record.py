"""Run everything that a GPU can show and write what came out to a record: make gpu-record.

The record is a Markdown page under bench/results/<gpu>/ with the command, versions, GPU and date, the outcome of every
group of tests, the largest errors against FBGEMM's CUDA kernels, and the demo's table. It says so where something
failed or did not run; the exit code is then not 0.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

import torch

from bench.results import without_folder
from fbtriton.__main__ import info

ROOT = Path(__file__).resolve().parent.parent


def run_tests(junit: Path, options: list[str]) -> str:
    """Everything but the offline compiles, kernels on the GPU; returns the command."""
    command = ["-m", "pytest", "tests", "-m", "not compile", "-q", "-o", "junit_family=xunit1", f"--junitxml={junit}"]
    # The references run on the CPU: with all cores for each of several processes they would mostly wait.
    environment = {"OMP_NUM_THREADS": "2"} | os.environ
    subprocess.run([sys.executable, *command, *options], cwd=ROOT, env=environment)
    if not junit.exists():
        sys.exit("pytest did not finish, so there is nothing to record")
    return "python " + shlex.join([*command[:-1], *options])


def read_results(junit: Path) -> tuple[dict[str, Counter[str]], dict[str, dict[str, float]], list[str]]:
    """For each test file the outcomes, for each parity test its largest errors, and the names of what failed."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    failed = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        kind = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        outcomes[case.get("file") or case.get("classname") or "?"][kind] += 1
        if kind in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        group = parity_group(case.get("name", ""))
        if group:
            for item in case.iter("property"):
                name, value = item.get("name", ""), float(item.get("value", "nan"))
                errors[group][name] = max(errors[group].get(name, 0.0), value)
    return outcomes, errors, failed


def parity_group(name: str) -> str | None:
    """test_fbgemm_ten_steps[cuda-sgd-0.03125-sum-apart-...] -> ten steps, sgd; CUDA only."""
    match = re.match(r"test_fbgemm_(\w+)\[cuda-(sgd|rowwise_adagrad|adam)", name)
    return f"{match[1].replace('_', ' ')}, {match[2]}" if match else None


def outcome_table(outcomes: dict[str, Counter[str]]) -> str:
    rows = ["| tests | passed | failed | not run |", "|---|---|---|---|"]
    for file, counts in sorted(outcomes.items()):
        bad = counts["failure"] + counts["error"]
        rows.append(f"| {file} | {counts['passed']} | {bad} | {counts['skipped']} |")
    return "\n".join(rows)


def error_table(errors: dict[str, dict[str, float]]) -> str:
    if not errors:
        return ""
    names = sorted({name for group in errors.values() for name in group})
    heads = [name.removesuffix("_max_error").replace("_max_error_", " in ").replace("_", " ") for name in names]
    rows = [
        "Largest errors, as a share of the largest magnitude (or in ulp of the element where the head says so).",
        "Promised: 1e-5, and 2 ulp for fp16 weights.",
        "",
        "| against FBGEMM CUDA | " + " | ".join(heads) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for group, values in sorted(errors.items()):
        rows.append(f"| {group} | " + " | ".join(f"{values[n]:.2g}" if n in values else "" for n in names) + " |")
    return "\n".join([*rows, ""])


def run_demo(arguments: list[str]) -> tuple[int, str, str]:
    command = ["examples/movielens.py", "--device", "cuda", *arguments]
    started = time.monotonic()
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    print(result.stdout, result.stderr[-2000:] if result.returncode else "")
    table = result.stdout[result.stdout.find("MovieLens-100K,") :].rstrip()
    shown = "python " + " ".join(without_folder(argument) for argument in command)
    return result.returncode, table, f"`{shown}`: exit code {result.returncode}, {time.monotonic() - started:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--commit", default="not given", help="of the tree, where there is no .git")
    parser.add_argument("--name", default="correctness", help="of the page, for a record of some of the tests")
    parser.add_argument("--demo", default="", help="arguments of the demo, such as '--data DIR'; none = it is not run")
    parser.add_argument("--pytest", default="-n 8", help="further arguments of pytest")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("make gpu-record needs a CUDA GPU; there is none")
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    folder = args.out / gpu
    folder.mkdir(parents=True, exist_ok=True)
    junit = folder / "tests.xml"
    started = time.monotonic()
    command = run_tests(junit, shlex.split(args.pytest))
    seconds = time.monotonic() - started
    outcomes, errors, failed = read_results(junit)
    junit.unlink()
    code, demo, demo_command = (0, "", "not run") if args.demo == "none" else run_demo(shlex.split(args.demo))
    verdict = (
        "everything that ran passed"
        if not failed and code == 0
        else "FAILED: " + ", ".join([*failed, *["the demo"][: code != 0]])
    )
    page = f"""# Correctness record, {torch.cuda.get_device_name()}

{time.strftime("%Y-%m-%d")}, commit {args.commit}. Written by `make gpu-record` (`tools/gpu_record.py`).
Outcome: {verdict}.

```
{info()}
```

## Tests

`{command}` ({seconds:.0f} s)

{outcome_table(outcomes)}

{error_table(errors)}
## Demo

{demo_command}

```
{demo}
```
"""
    path = folder / f"{args.name}.md"
    path.write_text(page)
    print(page if os.environ.get("CI") != "true" else path)
    sys.exit(bool(failed) or code)


if __name__ == "__main__":
    main()
