"""Run the test suites, each in a process of its own, and sum up. Fails if one fails or collects nothing.

    .venv/bin/python tools/run_tests.py                       # all three
    .venv/bin/python tools/run_tests.py interpreter -k sgd    # one; the rest goes to pytest

They are apart because Triton reads TRITON_INTERPRET when it decorates a kernel: a process runs kernels either
in the interpreter or on a GPU. With a GPU, the interpreter suite runs its kernels there.
"""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import torch

SUITES = {
    "plain": "not interpreter and not compile",
    "interpreter": "interpreter",
    "compile": "compile",
}
SHOWN = ["torch", "triton", "fbtriton", "numpy", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec"]
MAX_WORKERS = 4
NOTHING_COLLECTED = 5  # pytest's exit code


def main() -> None:
    print(versions(), flush=True)
    suites = list(takewhile(SUITES.__contains__, sys.argv[1:]))
    options = sys.argv[1 + len(suites) :]
    outcomes = {name: run(name, options) for name in suites or SUITES}
    print("\nmake test: " + "; ".join(f"{name} {outcome}" for name, (_, outcome) in outcomes.items()))
    sys.exit(any(code != 0 for code, _ in outcomes.values()))


def run(name: str, options: list[str]) -> tuple[int, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if name == "interpreter" and not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-m", SUITES[name]]
    workers = min(os.cpu_count() or 1, MAX_WORKERS)
    if find_spec("xdist") and workers > 1:
        environment["OMP_NUM_THREADS"] = "1"  # the workers fill the cores already
        command += ["-n", str(workers)]
    print(f"\n--- {name}: {' '.join(command[1:] + options)}", flush=True)
    started = time.monotonic()
    code = subprocess.run(command + options, env=environment, cwd=Path(__file__).parent.parent).returncode
    seconds = f"({time.monotonic() - started:.0f} s)"
    if code == NOTHING_COLLECTED:
        return code, f"FAILED: no tests collected {seconds}"
    return code, f"FAILED with exit code {code} {seconds}" if code else f"passed {seconds}"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in SHOWN:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(found + (gpus or ["no GPU"]))


if __name__ == "__main__":
    main()
