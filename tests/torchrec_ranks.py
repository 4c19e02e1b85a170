"""Ranks: processes that form a gloo group and run one function after another, for tests of TorchRec.

A rank takes seconds to import TorchRec, so a pytest process keeps its ranks from test to test. Where a function fails,
or does not come back, all ranks of the group are ended and the next test gets new ones.
"""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from pathlib import Path

MOST_RANKS = 4  # of one pytest process; each takes some 400 MB
TIMEOUT = 120  # seconds, for any function of any test; most take one

_groups = {}


class Ranks:
    """`world_size` processes; `local_size` of them are on one host, as far as TorchRec knows."""

    def __init__(self, world_size, local_size):
        spawn = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            here, there = spawn.Pipe()
            arguments = (there, rank, world_size, local_size, str(Path(self.folder.name) / "rendezvous"))
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, **arguments):
        """function(**arguments) on every rank -> the results, rank by rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} did not return from {function.__name__} within {TIMEOUT} s")
            failed, result = pipe.recv()
            if failed:
                raise AssertionError(f"rank {rank}:\n{result}")
            results.append(result)
        return results

    def end(self):
        for process in self.processes:
            process.kill()
        self.folder.cleanup()


def run_on_ranks(world_size, function, *, local_size=None, **arguments):
    """function(**arguments), of a module that can be imported, on each of world_size ranks -> their results."""
    key = world_size, local_size or world_size
    if key not in _groups:
        if sum(size for size, _ in [*_groups, key]) > MOST_RANKS:
            end_all()
        _groups[key] = Ranks(*key)
    try:
        return _groups[key].run(function, **arguments)
    except BaseException:
        _groups.pop(key).end()
        raise


def end_all():
    while _groups:
        _groups.popitem()[1].end()


def _serve(pipe, rank, world_size, local_size, rendezvous):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    warnings.simplefilter("ignore")  # PyTorch's and TorchRec's of each other
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(**arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))
