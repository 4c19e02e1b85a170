"""Ranks: processes that form a process group and run one function after another.

A rank takes seconds to import TorchRec, so it is kept from one function to the next.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any


class Ranks:
    """`world_size` processes; `local_size` of them are on one host, as far as TorchRec knows.

    They import and connect while the caller goes on. Once a function failed or was late, only `end` is of use.
    """

    def __init__(
        self,
        world_size: int,
        local_size: int | None = None,
        device: str = "cpu",
        timeout: float = 120,
        prepare: Callable[[], None] | str | None = None,
    ) -> None:
        """
        Args:
            device: "cpu" for gloo, "cuda" for NCCL with one GPU a rank, "any" for both where there is a GPU.
            timeout: seconds until a collective fails.
            prepare: what each rank calls first: a function, or "module:name" if the caller does not import it.
        """
        spawn = multiprocessing.get_context("spawn")
        self.world_size = world_size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.name = "their start"
        rendezvous = str(Path(self.folder.name) / "rendezvous")
        for rank in range(world_size):
            here, there = spawn.Pipe()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank % (local_size or world_size)),
                "LOCAL_WORLD_SIZE": str(local_size or world_size),
            }
            arguments = (there, environment, device, timeout, rendezvous, prepare)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any] | str, **arguments: Any) -> None:
        """Let every rank call function(**arguments), of a module that it can import; or "module:name"."""
        self.name = function if isinstance(function, str) else function.__name__
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def finish(self, timeout: float) -> list[Any]:
        """The results of what was started, rank by rank.

        Raises:
            TimeoutError: a rank did not return.
            RuntimeError: a rank failed, which is said with its traceback, or ended.
        """
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while missing := [rank for rank in range(self.world_size) if rank not in results]:
            ready = wait([self.pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {missing} did not return from {self.name} within {timeout:.0f} s")
            for rank in missing:
                if self.pipes[rank] in ready:
                    try:
                        failed, results[rank] = self.pipes[rank].recv()
                    except (EOFError, ConnectionError):
                        raise RuntimeError(f"rank {rank} ended in {self.name}") from None
                    if failed:
                        raise RuntimeError(f"rank {rank}:\n{results[rank]}")
        return [results[rank] for rank in range(self.world_size)]

    def run(self, function: Callable[..., Any] | str, *, timeout: float, **arguments: Any) -> list[Any]:
        """function(**arguments) on every rank -> the results, rank by rank. Raises as `finish` does."""
        self.start(function, **arguments)
        return self.finish(timeout)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        self.folder.cleanup()


def _serve(
    pipe: Any,
    environment: dict[str, str],
    device: str,
    timeout: float,
    rendezvous: str,
    prepare: Callable[[], None] | str | None,
) -> None:
    os.environ |= environment
    warnings.simplefilter("ignore")  # PyTorch's and TorchRec's of each other
    failure = None
    try:
        _connect(device, timeout, rendezvous)
        if prepare is not None:
            _resolve(prepare)()
    except BaseException:
        failure = traceback.format_exc()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, failure) if failure else (False, _resolve(function)(**arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def _resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, name = function.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _connect(device: str, timeout: float, rendezvous: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"a rank needs a GPU of its own, got {torch.cuda.device_count()} GPUs for rank {local_rank}"
            )
        torch.cuda.set_device(local_rank)
    both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl", "any": both}[device],
        init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )
