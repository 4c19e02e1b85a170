"""What the kernels of the workloads occupy, from compilations for GPUs that need not be present.

Each workload's operator runs once through `fbtriton.compile_only`, with tables of few rows and a tiny batch: what
is compiled depends on dims, dtypes, pooling and features, not on how many rows there are. Triton compiles equal
variants once. Resident warps are predicted from registers, shared memory and the limit of CTAs.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench import tables
from bench.workloads import DTYPES, ID_DTYPES, Workload
from fbtriton import tlx
from fbtriton.config import FusedConfig


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor has to share among its CTAs."""

    registers: int = 65_536
    register_unit: int = 256  # a warp's registers are allocated in such units
    partitions: int = 4  # each with a quarter of the registers
    warps: int = 64
    ctas: int = 32
    shared_bytes: int = 228 * 1024
    shared_reserved: int = 1024  # by the system, for each CTA


# From the CUDA programming guide, table of technical specifications; the two are alike in these numbers.
MULTIPROCESSORS = {90: Multiprocessor(), 100: Multiprocessor()}


def resident_warps(registers: int, shared: int, num_warps: int, target: Multiprocessor) -> int:
    """Warps of one kernel that a multiprocessor holds at a time."""
    per_warp = -(-registers * 32 // target.register_unit) * target.register_unit
    by_registers = target.partitions * (target.registers // target.partitions // max(per_warp, 1)) // num_warps
    by_shared = target.shared_bytes // (shared + target.shared_reserved)
    return num_warps * min(target.ctas, target.warps // num_warps, by_registers, by_shared)


def shrink(workload: Workload) -> Workload:
    """The same operator over few rows and samples."""
    features = len(workload.feature_tables)
    return replace(
        workload,
        rows=tuple(min(rows, 1000) for rows in workload.rows),
        batch=2,
        bags=(40,) * features,  # long enough for runs that are cut into pieces
        batch_sizes=None,
        fixed_bags=True,
        trace=None,
    )


def _variant_name(kernel: Any) -> str:
    """The constants of a kernel that tell its variants apart."""
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}
    shown = {name: value for name, value in constants.items() if name.isupper() and name not in ("BLOCK_D", "UPDATE")}
    dims = ["DIMS=" + ",".join(map(str, shown["DIMS"]))] if "DIMS" in shown else []
    return " ".join(dims + [f"{name}={value:d}" for name, value in shown.items() if isinstance(value, int)])


def _types(kernel: Any) -> str:
    """Pointer types that differ between variants, in the order of the arguments."""
    flat = str([kernel.src.signature])
    found = [name for name in ("fp16", "bf16", "fp32", "i32", "i64") if f"*{name}" in flat]
    return " ".join(found)


def _examine(kernel: Any, arch: int) -> dict[str, Any]:
    from fbtriton.compile_only import arithmetic, load_widths, resources

    used = resources(kernel)
    warps = kernel.metadata.num_warps
    return {
        "kernel": kernel.name,
        "arch": arch,
        "variant": _variant_name(kernel),
        "pointers": _types(kernel),
        "num_warps": warps,
        "registers": used.registers,
        "spills": used.spills,
        "shared_bytes": used.shared_bytes,
        "resident_warps": resident_warps(used.registers, used.shared_bytes, warps, MULTIPROCESSORS[arch]),
        "loads": dict(sorted(load_widths(kernel).items())),
        "fp32": dict(sorted(arithmetic(kernel).items())),
    }


def fused_variants(arch: int) -> list[FusedConfig]:
    """Long runs in one launch, as far as this Triton can compile it for the arch."""
    if not tlx.available():
        return [FusedConfig()]
    queues = [False] if arch < 100 else [False, True]
    return [FusedConfig(clc=clc, reduce=reduce) for clc in queues for reduce in (False, True)]


def compile_workload(workload: Workload, ids: str, arch: int, seen: set[str]) -> list[dict[str, Any]]:
    """The variants that one forward and backward launch and that are not in `seen`, to which they are added."""
    import torch

    from bench.workloads import make_request
    from fbtriton import RowwiseAdagrad, Table, TableBatchedEmbeddingBags
    from fbtriton.compile_only import compile_only
    from fbtriton.config import force_config

    small = shrink(workload)
    module = TableBatchedEmbeddingBags(
        [Table(rows, dim) for rows, dim in zip(small.rows, small.dims, strict=True)],
        optimizer=RowwiseAdagrad(0.1),
        feature_table_map=list(small.feature_tables),
        pooling=small.pooling,
        weights_dtype=DTYPES[small.dtype],
        device="cpu",
    )
    request = make_request(small, 0, torch.device("cpu"), ID_DTYPES[ids])
    compiled = []
    block_dims = tuple(bucket.block_dim for bucket in module.spec.layout.buckets)
    for fused in (False, *(variant for variant in fused_variants(arch) if variant.fits(block_dims))):
        with force_config(fused=fused), compile_only("cuda", arch) as kernels:
            output = module(*request)
            output.backward(torch.ones(output.shape))
        compiled += kernels
    found = []
    for kernel in compiled:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            found.append(_examine(kernel, arch))
    return found


def unique(workloads: list[Workload]) -> list[Workload]:
    """Workloads that differ in more than rows, batch and ids; the first of each kind stands for all."""
    kinds: dict[Any, Workload] = {}
    for workload in workloads:
        small = replace(shrink(workload), name="", source="", alpha=1.0, group="", rows=(1000,) * len(workload.rows))
        kinds.setdefault(small, workload)
    return list(kinds.values())


def silence() -> None:
    """nvdisasm warns for every cubin; what goes wrong comes back as an exception."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


_seen: dict[int, set[str]] = {}  # of this process, by arch


def _task(workload: dict[str, Any], ids: str, arch: int) -> list[dict[str, Any]]:
    return compile_workload(Workload.from_dict(workload), ids, arch, _seen.setdefault(arch, set()))


def examine(workloads: list[Workload], archs: list[int], ids: list[str]) -> list[dict[str, Any]]:
    """All variants, each once for each arch, with a progress bar. One process for each arch."""
    from fbtriton.config import INTERPRET

    if INTERPRET:
        raise ValueError("occupancy compiles kernels; unset TRITON_INTERPRET")
    unknown = [arch for arch in archs if arch not in MULTIPROCESSORS]
    if unknown:
        raise ValueError(f"arch must be one of {', '.join(map(str, MULTIPROCESSORS))}, got {unknown[0]}")
    tasks = [(w.to_dict(), dtype, arch) for w in unique(workloads) for dtype in ids for arch in archs]
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = tables.console(stderr=True)
    rows = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=len(tasks))
        spawn = get_context("spawn")
        pools = {arch: ProcessPoolExecutor(1, mp_context=spawn, initializer=silence) for arch in archs}
        futures = {pools[arch].submit(_task, w, dtype, arch): w["name"] for w, dtype, arch in tasks}
        for future in as_completed(futures):
            rows += future.result()
            bar.update(task, advance=1, description=futures[future])
        for pool in pools.values():
            pool.shutdown()
    return sorted(rows, key=lambda row: (row["kernel"], row["variant"], row["pointers"], row["arch"]))


def _loads(loads: dict[str, int]) -> str:
    return " ".join(f"{name.removeprefix('LDG.E').removeprefix('.') or '32'}x{count}" for name, count in loads.items())


NUMBERS = ("registers", "spills", "shared_bytes", "resident_warps")


def _alike(rows: list[dict[str, Any]], archs: list[int]) -> list[tuple[dict[str, Any], dict[str, str], int]]:
    """One line for variants that look the same: the first, its numbers (one for each arch where they differ), and how
    many variants there are."""
    grouped: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        key = (row["kernel"], row["variant"], row["pointers"], row["num_warps"])
        grouped.setdefault(key, {arch: [] for arch in archs})[row["arch"]].append(row)
    lines = []
    for by_arch in grouped.values():
        several = [found for found in by_arch.values() if found]
        texts = {}
        for name in NUMBERS:
            spans = [_span([row[name] for row in found]) for found in several]
            texts[name] = spans[0] if len(set(spans)) == 1 else " / ".join(spans)
        loads = list(dict.fromkeys(_loads(found[0]["loads"]) for found in several))
        lines.append((several[0][0], texts | {"loads": " / ".join(loads)}, max(map(len, several))))
    return lines


def _span(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def occupancy_table(rows: list[dict[str, Any]], archs: list[int]) -> Table:
    names = " / ".join(f"sm_{arch}" for arch in archs)
    table = Table(
        title=f"compiled without a GPU for {names} (one number where they agree); resident: warps of 64 on a"
        " multiprocessor; loads: bits a lane (or type) x instructions"
    )
    for name in ("kernel", "variant", "pointers"):
        table.add_column(name, no_wrap=name != "variant", overflow="fold")
    for name in ("count", "warps", "registers", "spills", "shared", "resident"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loads")
    previous = None
    for row, texts, count in _alike(rows, archs):
        if previous not in (None, row["kernel"]):
            table.add_section()
        shown = row["kernel"] if row["kernel"] != previous else ""
        table.add_row(
            shown, row["variant"], row["pointers"], str(count), str(row["num_warps"]),
            *[texts[name] for name in NUMBERS], texts["loads"],
        )  # fmt: skip
        previous = row["kernel"]
    return table


def print_occupancy(workloads: list[Workload], archs: list[int], ids: list[str], json_out: Path | None) -> None:
    """Compile, print the table, and write the numbers if asked to."""
    rows = examine(workloads, archs, ids)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n")
    console = tables.console()
    console.print(occupancy_table(rows, archs))
    spilling = sum(row["spills"] > 0 for row in rows)
    console.print(f"{len(rows)} variants, {spilling} of them spill registers")
