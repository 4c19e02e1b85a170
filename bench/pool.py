"""Worker processes: started ahead, given one job at a time, ended when they hang, started again when they die."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_STARTS = 12  # of one worker; a provider that dies more often than this is given up


class Worker:
    """One process; see `bench.worker`."""

    def __init__(self, provider: str, base: str | None = None) -> None:
        self.command = [sys.executable, "-m", "bench.worker", "--provider", provider]
        if base:
            self.command += ["--base", base]
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.log = tempfile.TemporaryFile(mode="w+", errors="replace")
        environment = os.environ | {"KINETO_LOG_LEVEL": "5", "PYTHONPATH": _python_path()}
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log
        )
        self.pending = b""

    def run(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The job's result; a worker that dies or takes too long fails the job."""
        if self.process.poll() is not None:
            if self.starts >= MAX_STARTS:
                return {"status": "failed", "reason": f"the process died {self.starts} times"}
            self.start()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        line = self._read_line(timeout)
        if line is None:
            if self.process.poll() is not None:
                return self._died()
            self.process.kill()
            self.process.wait()
            return {"status": "failed", "reason": f"took longer than {timeout:.0f} s"}
        result = json.loads(line)
        if not result.pop("usable"):
            self.close()
        return result

    def _read_line(self, timeout: float) -> bytes | None:
        """The next line, or None at the end of the output or of the time."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self.pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
                return None
            part = os.read(descriptor, 2**16)
            if not part:
                self.process.wait()
                return None
            self.pending += part
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _died(self) -> dict[str, Any]:
        code = self.process.wait()
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        last = lines[-1][:300] if lines else "no message"
        return {"status": "failed", "reason": f"the process ended with code {code}: {last}"}

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            try:
                self.process.stdin.close()
                self.process.wait(timeout=5)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                self.process.kill()
                self.process.wait()


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])


class Pool:
    """The workers of a run, by name."""

    def __init__(self, base: str | None = None) -> None:
        self.base = base
        self.workers: dict[tuple[str, str], Worker] = {}

    def prepare(self, provider: str, role: str) -> Worker:
        """Start a worker without waiting for it, so that all import at the same time."""
        from bench.providers import BASE

        key = (provider, role)
        if key not in self.workers:
            self.workers[key] = Worker(provider, self.base if provider == BASE else None)
        return self.workers[key]

    def run(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Run a job in the worker for its provider; host times have a worker of their own."""
        role = "host" if job["kind"] == "host" else "main"
        return self.prepare(job["provider"], role).run(job, timeout)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
