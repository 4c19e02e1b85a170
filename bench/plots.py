"""Plots of a result: speed-up, distance from the roofline, per-kernel stacks, scaling."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from bench import results as store
from bench.workloads import SCALING

COLORS = {"fbtriton": "#2563eb", "fbgemm": "#ea7317", "embedding-bag": "#6b7280"}
NAMES = {"fbtriton": "fbtriton", "fbgemm": "FBGEMM", "embedding-bag": "nn.EmbeddingBag"}
DIRECTION_COLORS = {"forward": "#60a5fa", "backward": "#1e40af"}
KERNELS_SHOWN = 7  # of each provider; the others are one segment
STYLE: Any = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 120}


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    return path


def _compared(results: dict[str, Any]) -> list[str]:
    """Workloads that are not part of a sweep and have a GPU time."""
    timed = {r["workload"] for r in results["records"] if store.median(r, "gpu_forward") is not None}
    return [name for name, w in results["workloads"].items() if w["group"] != "scaling" and name in timed]


def _best_pair(results: dict[str, Any], workload: str, direction: str) -> dict[str, dict[str, Any]]:
    """The records that a ratio is made of; fbtriton alone where FBGEMM has no time."""
    measure = f"gpu_{direction}"
    theirs = store.best(store.records(results, workload=workload, provider="fbgemm"), measure)
    key = {"ids": theirs["ids"]} if theirs else {}
    ours = store.best(store.records(results, workload=workload, provider="fbtriton", **key), measure)
    return {name: record for name, record in (("fbgemm", theirs), ("fbtriton", ours)) if record is not None}


def _octaves(axis: Axes, low: float, high: float) -> None:
    """A logarithmic x axis with ticks 1/2, 1, 2, 4 ..."""
    axis.set_xscale("log", base=2)
    ticks = [2.0**k for k in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axis.xaxis.set_major_locator(FixedLocator(ticks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.set_xlim(low, high)


def plot_speedup(results: dict[str, Any], path: Path) -> Path | None:
    """GPU time of FBGEMM at its best over fbtriton's, with a line where they are equal."""
    found = {
        name: {d: pair[0] for d in DIRECTION_COLORS if (pair := store.speedup(results, name, d))}
        for name in _compared(results)
    }
    found = {name: ratios for name, ratios in found.items() if ratios}
    if not found:
        return None
    values = [ratio for ratios in found.values() for ratio in ratios.values()]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.55 * len(found)))
    for row, ratios in enumerate(found.values()):
        for direction, ratio in ratios.items():
            place = row + (-0.19 if direction == "forward" else 0.19)
            axis.barh(place, ratio - 1, left=1, height=0.36, color=DIRECTION_COLORS[direction])
            inside = ratio < 1
            axis.annotate(
                f"{ratio:.2f}", (ratio, place), xytext=(-4 if inside else 4, 0), textcoords="offset points",
                ha="right" if inside else "left", va="center", fontsize=9,
            )  # fmt: skip
    _octaves(axis, min(0.5, min(values) / 1.5), max(2.0, max(values) * 1.5))
    axis.axvline(1, color=COLORS["fbgemm"], linewidth=2)
    axis.text(1, -0.75, "FBGEMM = 1", color=COLORS["fbgemm"], ha="center", va="bottom", fontsize=10)
    axis.set_yticks(range(len(found)), list(found))
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("times faster than FBGEMM at its best setting (GPU time, same ids)")
    handles = [Patch(color=color, label=name) for name, color in DIRECTION_COLORS.items()]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.06), ncol=2, frameon=False)
    return _save(figure, path)


def plot_roofline(results: dict[str, Any], path: Path) -> Path | None:
    """The share of the copy bandwidth at which the least bytes move: 100 % is the floor."""
    workloads = [name for name in _compared(results) if results["copy_bandwidth"]]
    if not workloads:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.4 + 0.36 * len(workloads)), sharey=True, sharex=True)
    for axis, direction in zip(axes, DIRECTION_COLORS, strict=True):
        for row, name in enumerate(workloads):
            shares = {}
            for provider, record in _best_pair(results, name, direction).items():
                floor = store.floors(results, record).get(direction)
                time = store.median(record, f"gpu_{direction}")
                if floor and time:
                    shares[provider] = 100 * floor / time
            if len(shares) == 2:
                axis.plot(list(shares.values()), [row, row], color="#d1d5db", linewidth=3, zorder=1)
            for provider, share in shares.items():
                axis.scatter(share, row, s=60, color=COLORS[provider], zorder=2, label=NAMES[provider])
        axis.axvline(100, color="black", linewidth=1, linestyle="--")
        axis.set_title(direction)
        axis.set_xlabel("% of the floor's speed: least bytes / time / copy bandwidth")
        axis.grid(axis="x", alpha=0.3)
        axis.set_yticks(range(len(workloads)), workloads)
        axis.set_ylim(len(workloads) - 0.5, -0.5)
    axes[0].set_xlim(left=0, right=max(105, axes[0].get_xlim()[1]))
    handles = [Patch(color=COLORS[provider], label=NAMES[provider]) for provider in ("fbtriton", "fbgemm")]
    bandwidth = results["copy_bandwidth"]["median"] / 1e12
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.0), ncol=2, frameon=False)
    figure.suptitle(f"copy bandwidth {bandwidth:.2f} TB/s = 100 %", y=1.04, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    return _save(figure, path)


def _kernel_colors(shown: dict[str, dict[str, float]]) -> dict[tuple[str, str], Any]:
    """A colour for each of the kernels that take most time, for each provider in its own hues."""
    colors: dict[tuple[str, str], Any] = {}
    for provider, palette in (("fbtriton", "Blues_r"), ("fbgemm", "Oranges_r")):
        by_time = sorted(shown[provider].items(), key=lambda item: -item[1])
        names = [name for name, _ in by_time[:KERNELS_SHOWN]]
        for number, name in enumerate(names):
            colors[provider, name] = plt.get_cmap(palette)(0.05 + 0.8 * number / len(names))
    return colors


def _shorten(name: str) -> str:
    """Long names differ at their end."""
    return name if len(name) <= 48 else f"{name[:15]}...{name[-32:]}"


def plot_kernels(results: dict[str, Any], direction: str, path: Path) -> Path | None:
    """Where the GPU time goes, kernel by kernel, in parts of FBGEMM's time (or fbtriton's own, without FBGEMM's)."""
    pairs = {name: pair for name in _compared(results) if (pair := _best_pair(results, name, direction))}
    pairs = {name: pair for name, pair in pairs.items() if all("kernels" in record for record in pair.values())}
    if not pairs:
        return None
    shown: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    units = {}
    for name, pair in pairs.items():
        units[name] = store.median(pair.get("fbgemm", pair.get("fbtriton")), f"gpu_{direction}") or 1.0
        for provider, record in pair.items():
            for kernel in record["kernels"][direction]:
                shown[provider][kernel["name"]] += kernel["us"] / units[name]
    colors = _kernel_colors(shown)
    figure, axis = plt.subplots(figsize=(11, 1.5 + 0.62 * len(pairs)))
    for row, (name, pair) in enumerate(pairs.items()):
        for provider, record in pair.items():
            place = row + (-0.2 if provider == "fbtriton" else 0.2)
            _stack(axis, place, provider, record, direction, units[name], colors)
    axis.set_yticks(range(len(pairs)), list(pairs))
    axis.set_ylim(len(pairs) - 0.45, -0.6)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
    axis.set_xlabel(f"GPU time of the {direction}, FBGEMM at its best = 100 % (upper bar fbtriton, lower bar FBGEMM)")
    axis.axvline(1, color=COLORS["fbgemm"], linewidth=1)
    axis.set_xlim(left=0, right=axis.get_xlim()[1] * 1.1)
    handles = [Patch(color=color, label=f"{NAMES[p]}: {_shorten(name)}") for (p, name), color in colors.items()]
    handles.append(Patch(color="#d1d5db", label="other kernels"))
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.42, -0.1), ncol=2, frameon=False, fontsize=8.5)
    return _save(figure, path)


def _stack(
    axis: Axes, place: float, provider: str, record: dict[str, Any], direction: str, unit: float, colors: dict[Any, Any]
) -> None:
    left = rest = 0.0
    for kernel in record["kernels"][direction]:
        color = colors.get((provider, kernel["name"]))
        if color is None:
            rest += kernel["us"] / unit
            continue
        axis.barh(place, kernel["us"] / unit, left=left, height=0.38, color=color, edgecolor="white", linewidth=0.5)
        left += kernel["us"] / unit
    axis.barh(place, rest, left=left, height=0.38, color="#d1d5db")
    total = store.median(record, f"gpu_{direction}") or 0.0
    axis.annotate(
        f"{total:,.0f} us", (left + rest, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


def plot_scaling(results: dict[str, Any], path: Path) -> Path | None:
    """GPU time against batch, bag length and skew, where the sweeps were run."""
    if not any(name.startswith("scaling-") for name in results["workloads"]):
        return None
    labels = {"batch": "batch", "bag": "mean ids in a bag", "alpha": "skew of ids (alpha; 1 = uniform)"}
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), sharey="row")
    for row, direction in enumerate(DIRECTION_COLORS):
        for column, (name, values) in enumerate(SCALING.items()):
            axis = axes[row][column]
            _scaling_lines(results, axis, name, values, direction)
            axis.set_yscale("log")
            axis.grid(alpha=0.3, which="both")
            if name != "alpha":
                axis.set_xscale("log", base=2)
                axis.xaxis.set_minor_formatter(NullFormatter())
            axis.xaxis.set_major_locator(FixedLocator(list(values)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axis.set_xlabel(labels[name] if row else "")
        axes[row][0].set_ylabel(f"{direction}, GPU time (us)")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    return _save(figure, path)


def _scaling_lines(results: dict[str, Any], axis: Axes, name: str, values: tuple[float, ...], direction: str) -> None:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for value in values:
        workload = f"scaling-{name}-{value:g}"
        for provider, record in _best_pair(results, workload, direction).items():
            points[provider].append((value, store.median(record, f"gpu_{direction}") or math.nan))
        floor = next((f for r in store.records(results, workload=workload) if (f := store.floors(results, r))), None)
        if floor:
            points["floor"].append((value, floor[direction]))
    for provider in ("fbgemm", "fbtriton"):
        if points[provider]:
            axis.plot(*zip(*points[provider], strict=True), "o-", color=COLORS[provider], label=NAMES[provider])
    if points["floor"]:
        axis.plot(*zip(*points["floor"], strict=True), "--", color="black", linewidth=1, label="floor")


def write_plots(results: dict[str, Any], directory: Path) -> list[Path]:
    """Every plot that the result has data for."""
    with plt.rc_context(STYLE):
        written = [
            plot_speedup(results, directory / "speedup.png"),
            plot_roofline(results, directory / "roofline.png"),
            plot_kernels(results, "forward", directory / "kernels-forward.png"),
            plot_kernels(results, "backward", directory / "kernels-backward.png"),
            plot_scaling(results, directory / "scaling.png"),
        ]
    return [path for path in written if path is not None]
