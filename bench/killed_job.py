"""A training job of torchrun of which a rank is killed, while the caller does something else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/torchrec_dlrm.py"


class KilledJob:
    """`torchrun --max-restarts 1` of examples/torchrec_dlrm.py. The last rank gets SIGKILL as soon as a file is there;
    torchrun then ends the other ranks and starts all anew."""

    def __init__(self, ranks: int, arguments: list[str], folder: Path, sign: Path, timeout: float) -> None:
        """
        Args:
            arguments: of the example, which has `folder` for --out.
            sign: the file.
            timeout: seconds for all of it.
        """
        folder.mkdir(parents=True)
        self.ranks, self.folder, self.sign = ranks, folder, sign
        self.deadline = time.monotonic() + timeout
        torchrun = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1", EXAMPLE, *arguments]
        shown = [Path(word).name if word.startswith("/") else word for word in torchrun]
        self.shown = " ".join(["torchrun", *shown])
        self.error: Exception | None = None
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *torchrun]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        with open(folder / "log", "w") as log:
            self.job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        self.thread = threading.Thread(target=self._kill_one, daemon=True)
        self.thread.start()

    def _kill_one(self) -> None:
        try:
            while not self.sign.exists():
                self._check()
                time.sleep(0.02)
            os.kill(_child_of_rank(self.job.pid, self.ranks - 1), signal.SIGKILL)
            while self.job.poll() is None:
                self._check()
                time.sleep(0.05)
            self._check()
        except Exception as error:
            self.error = error
            self.end()

    def _check(self) -> None:
        if self.job.poll():
            raise RuntimeError(f"torchrun ended with exit code {self.job.returncode}\n{self._log()}")
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"the job of torchrun took too long\n{self._log()}")

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def finish(self) -> dict[str, Any]:
        """The figures that the example wrote. Raises what went wrong."""
        self.thread.join()
        if self.error is not None:
            raise self.error
        figures: dict[str, Any] = json.loads((self.folder / "torchrec_dlrm.json").read_text())
        return figures

    def end(self) -> None:
        """End torchrun and its workers, if they still run."""
        workers = _children(self.job.pid)
        if self.job.poll() is None:
            self.job.kill()
            self.job.wait()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(path.parent.name))
    return found


def _child_of_rank(parent: int, rank: int) -> int:
    for child in _children(parent):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise RuntimeError(f"torchrun has no child of rank {rank}")
