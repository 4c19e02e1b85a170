"""What a rank of torchrec_gpus.py runs: examples/torchrec_dlrm.py, and steps of a larger DLRM with their profile."""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torchrec_dlrm

import torchrec_integration
from bench import device_time
from bench.device_time import DeviceEvent
from bench.torchrec_step import BATCHES, KERNELS, Batch, Trainer, make_batches, wait

BLOCKS = 2  # of steps, of each kernel, in each direction of ABBA
PROFILED_BATCHES = 4
ALL_TO_ALL = re.compile("sendrecv|alltoall|all_to_all|memcpy ptop", re.IGNORECASE)
OTHER_COLLECTIVE = re.compile("nccl", re.IGNORECASE)


def prepare() -> None:
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torchrec_integration.install()


def device_of(name: str) -> torch.device:
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if name == "cuda" else torch.device("cpu")


load_data = functools.cache(torchrec_dlrm.movielens_data.load)


def train_example(arguments: list[str]) -> dict[str, Any]:
    """`examples/torchrec_dlrm.py` with these arguments -> what its run left behind, and its seconds."""
    start = time.perf_counter()
    args = torchrec_dlrm.parse_args(arguments)
    run = torchrec_dlrm.train(args.kernel, load_data(args.data), device_of(args.device), args)
    _free(args.device)
    return vars(run) | {"all_seconds": time.perf_counter() - start}


def train_examples(many: list[list[str]]) -> None:
    """One after another: so that their kernels are compiled, whatever they return."""
    for arguments in many:
        train_example(arguments)


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def time_kernels(sizes: dict[str, Any]) -> dict[str, Any]:
    """Wall time of a step with each kernel, in the order ABBA, and where its device time goes; the mean over ranks.

    Args:
        sizes: device, optimizer, and the arguments of torchrec_step.py that say what the model and its batches are;
            warm_up, steps (of a block) and profile.
    """
    args = argparse.Namespace(**sizes)
    device = device_of(args.device)
    batches = make_batches(device, args)
    trainers = {kernel: Trainer(kernel, args.optimizer, device, args) for kernel in KERNELS}
    found: dict[str, Any] = {kernel: {} for kernel in KERNELS}
    for kernel, trainer in trainers.items():
        losses = [trainer.step(batches[step % BATCHES]) for step in range(args.warm_up)]
        found[kernel]["first_losses"] = torch.stack(losses).tolist()
    blocks: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for kernel in (*KERNELS, *reversed(KERNELS)):
        blocks[kernel] += [block_of_steps(trainers[kernel], batches, device, args.steps) for _ in range(BLOCKS)]
    for kernel, trainer in trainers.items():
        found[kernel]["step_ms"] = blocks[kernel]
        try:
            found[kernel]["device"] = device_parts(trainer, batches) if args.profile else None
        except device_time.ProfileError as error:  # after the last step: the ranks are still together
            found[kernel] |= {"device": None, "profile_error": str(error)}
    entries = [batch.sparse.values().numel() for batch in batches]
    del trainers, trainer, batches
    _free(args.device)
    return found | {"ids_a_batch": statistics.mean(entries)}


def block_of_steps(trainer: Trainer, batches: list[Batch], device: torch.device, steps: int) -> float:
    """Milliseconds a step, of some steps in a row; the device is waited for at their end only."""
    wait(device)
    dist.barrier()
    start = time.perf_counter()
    for step in range(steps):
        trainer.step(batches[step % BATCHES])
    wait(device)
    return 1e3 * (time.perf_counter() - start) / steps


class Lookup:
    """The TBEs of this rank with the input that each had in a step, to be run alone."""

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        lookups = [lookup for module in trainer.model.modules() for lookup in getattr(module, "_lookups", ())]
        tbes = {
            id(module): module
            for lookup in lookups
            for module in lookup.modules()
            if type(module).__name__ == "SplitTableBatchedEmbeddingBagsCodegen"
        }
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        hooks = [
            tbe.register_forward_pre_hook(lambda *call: self.calls.append(call), with_kwargs=True)
            for tbe in tbes.values()
        ]
        trainer.step(batch)
        for hook in hooks:
            hook.remove()
        self.gradients = [torch.full_like(tbe(*args, **kwargs), 1e-6) for tbe, args, kwargs in self.calls]

    def __call__(self) -> None:
        """Forward and backward of each."""
        for (tbe, args, kwargs), gradient in zip(self.calls, self.gradients, strict=True):
            tbe(*args, **kwargs).backward(gradient)


def split_step(events: list[DeviceEvent]) -> dict[str, float]:
    """Microseconds of a step in all, in all-to-all and in other collectives, by the names of kernels."""
    us = {"step": 0.0, "all_to_all": 0.0, "collectives": 0.0}
    for event in events:
        us["step"] += event.duration
        if ALL_TO_ALL.search(event.name):
            us["all_to_all"] += event.duration
        elif OTHER_COLLECTIVE.search(event.name):
            us["collectives"] += event.duration
    return us


def device_parts(trainer: Trainer, batches: list[Batch]) -> dict[str, Any]:
    """Device milliseconds of a step: in all, in the TBEs (run alone, with the step's ids), in all-to-all and in other
    collectives. Those of the collectives include the time in which a rank waits for another."""
    chosen = batches[:PROFILED_BATCHES]
    lookups = [Lookup(trainer, batch) for batch in chosen]
    steps = [functools.partial(trainer.step, batch) for batch in chosen]
    flushed = torch.empty(256 << 20, dtype=torch.int8, device=chosen[0].labels.device)

    def flush_together() -> None:
        flushed.zero_()
        dist.barrier()

    calls = [call for pair in zip(steps, lookups, strict=True) for call in pair]
    events = device_time.profile_calls(calls, flush_together)
    us = [split_step(of_step) for of_step in events[::2]]
    ms = {name: statistics.median(one[name] for one in us) / 1e3 for name in us[0]}
    ms["tbe"] = statistics.median(sum(event.duration for event in of_lookup) for of_lookup in events[1::2]) / 1e3
    ms["rest"] = ms["step"] - ms["tbe"] - ms["all_to_all"] - ms["collectives"]
    kernels = device_time.summarise(events[::2]).kernels[:30]
    return {"ms": ms, "kernels": kernels, "tbe_kernels": device_time.summarise(events[1::2]).kernels[:12]}
