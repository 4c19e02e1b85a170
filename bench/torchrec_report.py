"""The record and the plot of a result of torchrec_gpus.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

KERNELS = {"fused": "FUSED", "fused_triton": "FUSED_TRITON"}
PROVIDERS = {"fused": "fbgemm", "fused_triton": "fbtriton"}  # as in plots.py
SHARES = {
    "tbe": ("embedding kernels", "#1e40af"),
    "all_to_all": ("all-to-all", "#d97706"),
    "collectives": ("other collectives", "#fcd34d"),
    "rest": ("rest", "#d1d5db"),
}
Rows = list[list[str]]


def markdown(head: list[str], rows: Rows) -> list[str]:
    align = ["---"] * len(head)
    return ["| " + " | ".join(cells) + " |" for cells in [head, align, *rows]] + [""]


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def parity_rows(part: dict[str, Any]) -> Rows:
    return [
        [
            case["plan"], case["optimizer"], case["pooling"], case["ids"], f"{case['losses'][0]:.5f}",
            f"{case['losses'][-1]:.5f}", f"{case['difference']:.1e}", yes(case["same_bits"]),
        ]
        for case in part.get("cases", [])
    ]  # fmt: skip


def parity(result: dict[str, Any], part: dict[str, Any]) -> list[str]:
    cases = part.get("cases", [])
    mixed = next((case["sharded"] for case in cases if case["plan"] == "mixed"), None)
    lines = [
        "## Both kernels, and the same bits", "",
        f"`examples/torchrec_dlrm.py`, {result['steps']} steps on {result['gpus']} ranks: the largest relative"
        f" difference of the losses of FUSED and FUSED_TRITON, which must be at most {result['bound']:g}; and whether a"
        " second run of FUSED_TRITON has the same losses, weights and optimizer states, bit by bit."
        f" {len(cases)} of {result['cases']} combinations were run.", "",
        *markdown(
            ["plan", "optimizer", "pooling", "ids", "first loss", "last loss", "difference", "same bits"],
            parity_rows(part),
        ),
    ]  # fmt: skip
    if mixed:
        lines += [f"The mixed plan: {', '.join(f'{table} {how}' for table, how in mixed.items())}.", ""]
    return lines


def checkpoints(result: dict[str, Any], part: dict[str, Any]) -> list[str]:
    rows = [
        [
            chain["name"], f"{chain['difference']:.1e}", yes(chain["same_bits"]),
            "the same bits" if chain["exact"] else f"{result['bound']:g}", "ok" if chain["ok"] else "FAILED",
        ]
        for chain in part.get("chains", [])
    ]  # fmt: skip
    return [
        "## Checkpoints", "",
        f"Three runs of {part.get('steps_a_link')} steps, each from the checkpoint of the one before"
        " (`torch.distributed.checkpoint`), beside one run without a break that stays with the first one's ranks and"
        f" kernel. Mixed plan, row-wise Adagrad; 1 and {result['gpus']} are numbers of ranks.", "",
        *markdown(["what changes", "largest relative difference", "same bits", "asked for", ""], rows),
    ]  # fmt: skip


def restart(result: dict[str, Any], part: dict[str, Any]) -> list[str]:
    lines = ["## A rank that is lost", ""]
    if "resumed_after" in part:
        lines += [
            f"`{part['command']}`", "",
            f"Rank {part['killed_rank']} got SIGKILL once the second checkpoint was there; torchrun started all ranks"
            f" anew, and they went on after step {', '.join(map(str, part['resumed_after']))} of {part['steps']}.", "",
            "Beside an undisturbed run,", "",
            f"- the same losses at every step: {yes(part['same_losses'])};",
            f"- the same weights and optimizer states, bit by bit: {yes(part['same_bits'])}.", "",
        ]  # fmt: skip
    return lines


def steps_rows(part: dict[str, Any]) -> Rows:
    rows = []
    for world in part.get("worlds", []):
        for kernel, name in KERNELS.items():
            found, ms = world[kernel], world[kernel]["device_ms"]
            shares = [f"{ms[key]:.2f} ({ms[key] / ms['step']:.0%})" if ms else "-" for key in SHARES]
            device = f"{ms['step']:.2f}" if ms else "-"
            rows.append(
                [str(world["gpus"]), name, f"{found['step_ms']:.2f}", f"{found['samples_per_s']:,.0f}", device, *shares]
            )
    return rows


STEPS_HEAD = ["GPUs", "kernel", "step, ms", "samples/s", "device, ms", *(name for name, _ in SHARES.values())]


def steps(result: dict[str, Any], part: dict[str, Any]) -> list[str]:
    model, worlds = part.get("model", {}), part.get("worlds", [])
    if not worlds:
        return ["## Steps", ""]
    size = model["tables"] * model["rows"] * model["dim"] * 4 / 1e9
    return [
        "## Steps", "",
        f"A DLRM (`bench/torchrec_step.py`): {model['tables']} tables of {model['rows']:,} rows of {model['dim']} fp32"
        f" columns, {size:.3g} GB in all, table-wise in turn over the GPUs; {model['batch_size']:,} samples a GPU,"
        f" {model['bag']} {model['ids']} ids in a bag on average ({worlds[0]['ids_a_batch']:,.0f} ids a batch and GPU),"
        f" the first rows most often; {model['optimizer']}, dense layers in fp32 with SGD. No pipeline: a step's"
        " exchange of ids is waited for.", "",
        "- step: wall time, the median of blocks of steps in the order ABBA;",
        "- device: durations of all kernels, memsets and copies of a step, summed, the mean over GPUs; streams overlap,"
        " so it can exceed the wall time;",
        "- embedding kernels: forward and backward of the TBEs alone, with the ids of the same steps, on a cold L2;",
        "- all-to-all (ids and pooled rows) and other collectives (all-reduce of the dense gradients): a GPU's waiting"
        " for another is in them. Rest: dense layers, and the permutations before and after an all-to-all.", "",
        *markdown(STEPS_HEAD, steps_rows(part)),
        *(
            f"On {world['gpus']} GPU(s) the losses of the first {model['warm_up']} steps differ by at most"
            f" {world['difference']:.1e}.  "
            for world in worlds
        ), "",
        "![Throughput, and where the device time goes](torchrec-gpus.png)", "",
    ]  # fmt: skip


SECTIONS = {"parity": parity, "checkpoints": checkpoints, "restart": restart, "steps": steps}


def record(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    outcomes = ", ".join(
        f"{name} {'ok' if part['ok'] else 'FAILED'} ({part['seconds']:.0f} s)" for name, part in result["parts"].items()
    )
    lines = [
        f"# TorchRec on {result['gpus']} x {result['machine']['name']}", "",
        "Written by `python bench/torchrec_gpus.py`; all numbers are in `torchrec-gpus.json`.", "",
        f"- command: `{result['command']}`",
        f"- date: {result['date']}; commit {result['commit']}, sources {result['sources']}",
        f"- versions: {versions}",
        f"- outcome: {outcomes}; {result['seconds']:.0f} s in all", "",
    ]  # fmt: skip
    if result.get("links"):
        lines += ["How the GPUs are linked (`nvidia-smi topo -m`):", "", "```", *result["links"], "```", ""]
    for name, part in result["parts"].items():
        lines += SECTIONS[name](result, part)
        if part.get("error"):
            lines += ["It failed:", "", "```", part["error"].strip()[-1500:], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput on one GPU and on several; and the parts of the device time, where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from bench.plots import COLORS, STYLE

    worlds = result["parts"]["steps"]["worlds"]
    profiled = all(world[kernel]["device_ms"] for world in worlds for kernel in KERNELS)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2 if profiled else 1, figsize=(11 if profiled else 5.5, 4), squeeze=False)
        left = axes[0][0]
        for offset, (kernel, name) in enumerate(KERNELS.items()):
            heights = [world[kernel]["samples_per_s"] / 1e3 for world in worlds]
            places = [place + 0.4 * offset - 0.2 for place in range(len(worlds))]
            bars = left.bar(places, heights, width=0.38, color=COLORS[PROVIDERS[kernel]], label=name)
            left.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=9)
        left.set_xticks(range(len(worlds)), [f"{world['gpus']} GPU{'s' * (world['gpus'] > 1)}" for world in worlds])
        left.set_ylabel("thousand samples a second")
        left.margins(y=0.15)
        left.legend(loc="upper left", frameon=False)
        if profiled:
            _stack(axes[0][1], worlds)
        figure.tight_layout()
        figure.savefig(path, bbox_inches="tight", facecolor="white")
        plt.close(figure)


def _stack(axis: Any, worlds: list[dict[str, Any]]) -> None:
    bars = [
        (f"{world['gpus']} GPU{'s' * (world['gpus'] > 1)}, {name}", world[kernel]["device_ms"])
        for world in worlds
        for kernel, name in KERNELS.items()
    ]
    for row, (_, ms) in enumerate(bars):
        left = 0.0
        for key, (_, color) in SHARES.items():
            axis.barh(row, ms[key], left=left, height=0.7, color=color, edgecolor="white", linewidth=0.5)
            if ms[key] > 0.08 * ms["step"]:
                light = key in ("tbe",)
                axis.text(
                    left + ms[key] / 2, row, f"{ms[key] / ms['step']:.0%}", ha="center", va="center", fontsize=9,
                    color="white" if light else "black",
                )  # fmt: skip
            left += ms[key]
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.invert_yaxis()
    axis.set_xlabel("device time of a step, ms (mean over GPUs)")
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=name) for name, color in SHARES.values()]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncol=2, frameon=False, fontsize=9)


def show(result: dict[str, Any]) -> None:
    """Tables for the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    if rows := steps_rows(result["parts"].get("steps", {})):
        table = Table(title=f"steps on {result['machine']['name']}")
        for column in STEPS_HEAD:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, part in result["parts"].items():
        console.print(f"{name}: {'[green]ok[/green]' if part['ok'] else '[red]FAILED[/red]'}, {part['seconds']:.0f} s")


def write_record(path: Path) -> None:
    """The record and the plot beside a result, and tables in the terminal."""
    result = json.loads(path.read_text())
    (path.parent / "torchrec-gpus.md").write_text(record(result))
    if result["parts"].get("steps", {}).get("worlds"):
        plot(result, path.parent / "torchrec-gpus.png")
    show(result)
