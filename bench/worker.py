"""A process that runs jobs: one JSON object a line in, one out.

Each provider has processes of its own, which import it once: a crash ends one of them and not the run, a second
copy of fbtriton can be imported beside the first, and the processes that take host times never load a profiler.
Between jobs a worker holds no GPU memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

KEPT_BYTES = 2**30  # a job that leaves more GPU memory behind ends the process


def _reply_stream() -> TextIO:
    """The real standard output; what libraries print goes to standard error instead."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def _use_copy(directory: str) -> None:
    """Import fbtriton from another directory."""
    sys.path.insert(0, directory)
    import fbtriton

    found = Path(fbtriton.__file__).resolve().parent.parent
    if found != Path(directory).resolve():
        raise SystemExit(f"{directory} holds no fbtriton; found {found}")


def _usable() -> bool:
    """Whether the process can go on: the device answers, and the last job's memory is back."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return torch.cuda.memory_allocated() < KEPT_BYTES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", help="directory with another copy of fbtriton")
    parser.add_argument("--provider", help="imported before the first job")
    args = parser.parse_args()
    replies = _reply_stream()
    if args.base:
        _use_copy(args.base)
    from bench.measure import run_job  # after the path is set

    _import_provider(args.provider)
    for line in sys.stdin:
        job = json.loads(line)
        result: dict[str, Any] = run_job(job)
        usable = _usable() and not result.get("capture_failed", False)
        replies.write(json.dumps(result | {"usable": usable}) + "\n")
        replies.flush()
        if not usable:
            break


def _import_provider(name: str | None) -> None:
    import torch

    from bench.providers import provider_class

    if name:
        provider_class(name).missing(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if provider_class(name).__name__ in ("Fbtriton", "Reference"):
            import fbtriton  # noqa: F401


if __name__ == "__main__":
    main()
