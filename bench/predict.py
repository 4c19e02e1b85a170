"""What a B200 should take, computed from results of an H200 and from compilations for both GPUs.

For each kernel of the H200's profile two times are computed. If bytes limit it, it takes the share of the memory
bandwidth that it takes on the H200: time * ratio of bandwidths. If latency limits it, what counts is how many warps
are under way on the whole GPU: time * ratio of (multiprocessors * resident warps), with the warps that the kernel's
registers and shared memory allow on either, the median over its variants. A kernel that is not ours, such as a sort,
counts as having the same warps. The sums over the kernels are the two ends of the prediction; caches, which are more
than twice as large, and clocks are left out.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bench import results as store


class Chip(NamedTuple):
    """What NVIDIA publishes of a GPU."""

    name: str
    arch: int
    multiprocessors: int
    bandwidth: float  # bytes/s, the peak


H200 = Chip("NVIDIA H200", 90, 132, 4.8e12)
B200 = Chip("NVIDIA B200", 100, 148, 8.0e12)
APART = ("grad_accum_kernel", "add_groups_kernel", "apply_kernel")
FUSED = "fused_long_run_kernel"
SLOTS = "slots, 32 programs"
DIRECTIONS = ("forward", "backward")


def resident_warps(variants: list[dict[str, Any]], kernel: str, arch: int) -> float | None:
    """The median over the variants; of the fused kernel those with ordered slots, handed out by CLC where it exists."""
    found = [row for row in variants if row["kernel"] == kernel and row["arch"] == arch]
    if kernel == FUSED:
        wanted = f"CLC={int(arch >= 100)} REDUCE=0"
        found = [row for row in found if row["variant"].endswith(wanted)]
    return statistics.median(row["resident_warps"] for row in found) if found else None


def latency_ratio(variants: list[dict[str, Any]], kernel: str) -> float:
    """Time on the B200 over time on the H200, if latency limits the kernel."""
    here, there = (resident_warps(variants, kernel, chip.arch) for chip in (H200, B200))
    warps = here / there if here and there else 1.0
    return H200.multiprocessors / B200.multiprocessors * warps


def predict(kernels: list[dict[str, Any]], variants: list[dict[str, Any]]) -> tuple[float, float]:
    """Least and largest time in us of kernels, from their names and times in us on the H200."""
    bytes_ratio = H200.bandwidth / B200.bandwidth
    ends = [(k["us"] * bytes_ratio, k["us"] * latency_ratio(variants, k["name"])) for k in kernels]
    return sum(min(pair) for pair in ends), sum(max(pair) for pair in ends)


def measured_ratios(long_runs: dict[str, Any]) -> dict[str, float]:
    """Of a record by tools/tlx_record.py, for each workload: long runs in one launch over those apart, on the H200 with
    ordered slots and a fixed grid of the size that a GPU gets."""
    times = long_runs["fused"]["fork"]["times"]
    return {name: found[SLOTS]["fused_long_run_kernel"] / _apart(found["apart"]) for name, found in times.items()}


def _apart(times: dict[str, float]) -> float:
    return sum(times.get(kernel, 0.0) for kernel in APART)


def predict_fused(times: dict[str, float], variants: list[dict[str, Any]], ratio: float) -> tuple[float, float]:
    """Least and largest time in us of long runs in one launch, from the kernels' times on the H200. It reads and adds
    what grad_accum does; at best the rest disappears behind that, at worst all takes `ratio` times as long as apart."""
    accumulate = times.get(APART[0], 0.0)
    warps = (resident_warps(variants, APART[0], H200.arch), resident_warps(variants, FUSED, B200.arch))
    if None in warps:
        raise ValueError("occupancy must hold the fused kernel with CLC; compile it with Meta's fork of Triton")
    latency = H200.multiprocessors / B200.multiprocessors * warps[0] / warps[1]  # type: ignore[operator]
    return accumulate * min(H200.bandwidth / B200.bandwidth, latency), ratio * _apart(times) * latency


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---", *["---:"] * (len(head) - 1)]), *map(_row, rows), ""]


def _span(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.0f} to {pair[1]:.0f}" if pair[1] >= 10 else f"{pair[0]:.1f} to {pair[1]:.1f}"


def predictions(results: dict[str, Any], variants: list[dict[str, Any]], ratios: dict[str, float]) -> list[list[str]]:
    """A row for each workload that was measured with int32 ids. Where there is no ratio the largest counts."""
    rows = []
    for name in results["workloads"]:
        record = store.best(store.records(results, workload=name, provider="fbtriton", ids="int32"), "gpu_step")
        if record is None or not record.get("kernels"):
            continue
        apart = [kernel for kernel in record["kernels"]["backward"] if kernel["name"] in APART]
        times = {kernel["name"]: kernel["us"] for kernel in apart}
        floors = store.floors(results, record)
        cells = [name]
        for direction in DIRECTIONS:
            floor = floors[direction] * H200.bandwidth / B200.bandwidth
            measured = store.median(record, f"gpu_{direction}") or 0.0
            cells += [f"{measured:.0f}", _span(predict(record["kernels"][direction], variants)), f"{floor:.0f}"]
        fused = predict_fused(times, variants, ratios.get(name, max(ratios.values())))
        spans = [_span(predict(apart, variants)), _span(fused)] if apart else ["", ""]
        rows.append([*cells, f"{_apart(times):.0f}", *spans])
    return rows


def occupancy_rows(variants: list[dict[str, Any]]) -> list[list[str]]:
    """Registers, spills, shared memory and resident warps of the kernels of long runs on both chips, as spans."""
    groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in variants:
        if row["kernel"] in (*APART, FUSED, "clear_rows_kernel"):
            kind = " ".join(part for part in row["variant"].split() if part.startswith(("CLC=", "REDUCE=")))
            groups.setdefault(f"{row['kernel']} {kind}".strip(), {}).setdefault(row["arch"], []).append(row)
    rows = []
    for name, by_arch in sorted(groups.items()):
        for chip in (H200, B200):
            found = by_arch.get(chip.arch, [])
            if found:
                numbers = ("registers", "spills", "shared_bytes", "resident_warps")
                spans = [(min(row[n] for row in found), max(row[n] for row in found)) for n in numbers]
                cells = [str(low) if low == high else f"{low} to {high}" for low, high in spans]
                rows.append([name, f"sm_{chip.arch}", str(len(found)), *cells])
    return rows


TEXT = """\
Nothing here was measured on Blackwell. What needs it, cluster launch control, is compiled and its machine code is read
by tests; without that the kernel has run on an H200, with ordered slots and with sums by TMA. The rest is computed. If
you have a B200 or GB200, this is how to check us.

## What to run

    make tlx-env
    .venv-tlx/bin/python -m pip install 'cuda-cccl[minimal-cu13]>=1.2.1,<2' fbgemm-gpu
    make b200

`make tlx-env` takes a CUDA build of torch from the index that pip knows, or the torch that the Python at hand has, and
puts Meta's fork of Triton in Triton's place. `make b200` first tests what needs Blackwell: long runs by cluster launch
control against the reference and against the kernels apart, contention, replayed graphs. Then it times long runs in
every variant (`bench/results/fused.json`), and all workloads beside FBGEMM (a file under `bench/results/nvidia-b200/`,
of which `python -m bench report FILE` makes a page). Weights that differ must be few: with ordered slots they can be
rounded otherwise than apart, as the slots of a group are added in another order and the update is compiled twice, and
with TMA no order is fixed. Two runs with ordered slots must agree to the bit.

On an H200 the kernels apart are faster than one launch, but for two workloads with few pieces, where it is up to 6 %
faster. With the fork a B200 takes long runs in one launch all the same; if the times say there what they say on the
H200, that choice (`select_fused`) is wrong.

**FBGEMM there.** On x86_64 install the CUDA wheel `fbgemm-gpu` of the release that goes with torch (1.9 with torch
2.14, 1.8 with 2.13); `cuobjdump --list-elf` on its libraries tells whether they hold code for sm_100. A GB200 is
aarch64, for which there is no CUDA wheel: build FBGEMM from source as its documentation says, with
`TORCH_CUDA_ARCH_LIST=10.0a`, or measure fbtriton alone (`make b200 BENCH_ARGS='--provider fbtriton'`).
"""


def write_page(results_file: Path, occupancy_file: Path, long_runs_file: Path, out: Path) -> None:
    """Write the page; every number on it is computed from the three files and what is published of the chips."""
    results, variants = store.load(results_file), json.loads(occupancy_file.read_text())
    ratios = measured_ratios(json.loads(long_runs_file.read_text()))
    least, most = min(ratios.values()), max(ratios.values())
    if results["machine"]["name"] != H200.name:
        raise ValueError(f"results must be of an {H200.name}, got {results['machine']['name']}")
    files = ", ".join(f"`{path.name}`" for path in (results_file, occupancy_file, long_runs_file))
    chips = "; ".join(
        f"{c.name}: {c.multiprocessors} multiprocessors, {c.bandwidth / 1e12:g} TB/s peak" for c in (H200, B200)
    )
    bandwidth = results["copy_bandwidth"]["median"]
    method = " ".join((__doc__ or "").split("\n\n", 1)[1].split())
    head = [
        "workload, int32 ids", "forward, H200", "B200", "floor", "backward, H200", "B200", "floor",
        "long runs apart, H200", "B200", "in one launch, B200",
    ]  # fmt: skip
    lines = [
        "# B200 and GB200: what to run, and what to expect", "", TEXT,
        "## Predictions", "",
        f"Written by `python -m bench predict` from {files} (H200, {results['date']}, commit"
        f" {results['commit']}; compiled by `bench occupancy --ids int32 --json` in the environment of"
        " `make tlx-env`).", "",
        method, "",
        f"Published: {chips}. A copy on the H200 reaches {bandwidth / H200.bandwidth:.0%} of its peak; the same"
        f" share is {bandwidth / H200.bandwidth * B200.bandwidth / 1e12:.1f} TB/s on the B200, and the floors are the"
        " byte model of `bench/limits.py` at that. GPU time, us:", "",
        *_table(head, predictions(results, variants, ratios)),
        "A time below its range means that the larger L2 helps, one above it that something else limits; then look at"
        " the kernels one by one. For long runs in one launch the range is wide: from grad_accum alone, which no"
        f" variant reached on the H200, to what the H200 took without cluster launch control, {least:.2f} to"
        f" {most:.2f} times all kernels apart ([why](results/nvidia-h200/{long_runs_file.stem}.md)); {most:.2f} where"
        " that was not measured. It holds the range of the kernels apart, so whether one launch is faster on a B200 is"
        " open.", "",
        "## What the compiler says", "",
        "Resident warps of 64 on a multiprocessor; spans over the variants of all workloads.", "",
        *_table(["kernel", "for", "variants", "registers", "spills", "shared bytes", "resident warps"],
                occupancy_rows(variants)),
    ]  # fmt: skip
    out.write_text("\n".join(lines).rstrip() + "\n")
