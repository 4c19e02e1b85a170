"""README.md of a results directory: what was measured, on what, and how far from FBGEMM and from the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import limits
from bench import results as store
from bench.tables import microseconds, name_of
from bench.workloads import Workload

MEASURES = """\
What the columns mean:

- **GPU time**: the durations of all device activity of the call (kernels, memsets, copies), summed, from a profile.
- **wall**: from the call to the device done, eager.
- **host**: from the call to its return while the stream is blocked; **one thread**: with the backward in the caller's
  thread, under `torch.autograd.set_multithreading_enabled(False)`.
- **graph**: between events around the replay of a CUDA graph.
- **memory**: allocated at the peak beyond weights, optimizer state, inputs and output.
- **floor**: the least bytes over the copy bandwidth measured in the same run; the byte model stands in
  `bench/limits.py`. Each distinct row, the output and the ids move once in the forward; the backward adds the passes
  of a sort. Caches are left out, so it is a lower bound; rows and gradients that come from the L2 again and again
  make it unreachable, and the time for them alone stands under "Least bytes".

Each time is the median of calls on distinct requests in rotation, with 256 MB written before each to empty the L2;
± is half the distance between the tenth and ninetieth percentile. Every provider was first checked against an oracle
on the rows it touched; one that was wrong has no time. FBGEMM's setting is the fastest of bounds check versions 1
and 2; a ratio has the same dtype of ids on both sides, the one at which FBGEMM is fastest. Row-wise Adagrad, bounds
check on, stochastic rounding of fp16 rows, fp32 outputs and gradients, no gradient of per-sample weights asked for.
"""
IMAGES = {
    "speedup.png": "Speed-up over FBGEMM",
    "roofline.png": "Distance from the floor",
    "kernels-forward.png": "Kernels of the forward",
    "kernels-backward.png": "Kernels of the backward",
    "scaling.png": "Time against batch, bag length and skew",
}
WITHOUT = "small-long-bags"  # left out of one mean: its ratio is far from the others


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Without columns that have nothing but a head."""
    filled = [column for column in range(len(head)) if any(row[column] for row in rows)]
    head, rows = [head[column] for column in filled], [[row[column] for column in filled] for row in rows]
    align = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in [head, align, *rows]] + [""]


def _head(results: dict[str, Any], files: list[str]) -> list[str]:
    machine, versions = results["machine"], results["versions"]
    named = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    lines = [
        f"# Measurements on {machine['name']}", "",
        f"Written by `python -m bench report` from {', '.join(f'`{file}`' for file in files)}.", "",
        f"- command: `{results['command']}`",
        f"- date: {results['date']}; commit {results['commit']}, sources {results['sources']}",
        f"- versions: {named}",
    ]  # fmt: skip
    if results["copy_bandwidth"]:
        lines.append(f"- copy bandwidth: {results['copy_bandwidth']['median'] / 1e12:.2f} TB/s, read plus written")
    for when in ("clocks_before", "clocks_busy", "clocks_after"):
        if machine.get(when):
            read = ", ".join(f"{name} {value}" for name, value in machine[when].items())
            lines.append(f"- {when.replace('_', ' ')} (nvidia-smi): {read}")
    return [*lines, ""]


def _workloads(results: dict[str, Any]) -> list[str]:
    return [name for name, values in results["workloads"].items() if values["group"] != "scaling"]


def _ratios(results: dict[str, Any]) -> list[str]:
    columns: dict[tuple[str, str], dict[str, float]] = {kind: {} for kind in store.RATIOS}
    rows = []
    for name in _workloads(results):
        cells = []
        for kind, direction in store.RATIOS:
            found = store.speedup(results, name, direction, kind=kind)
            if found:
                columns[kind, direction][name] = found[0]
            cells.append(f"{found[0]:.2f} ({found[1]})" if found else "")
        rows.append([name, *cells])
    if not any(columns.values()):
        return []
    for label, pick in _SUMMARIES.items():
        values = [pick(column) for column in columns.values()]
        rows.append([f"**{label}**", *[f"**{value:.2f}**" if value else "" for value in values]])
    head = [
        "times faster than FBGEMM",
        *[f"{kind} {direction}".replace("gpu", "GPU").replace("_", " ") for kind, direction in store.RATIOS],
    ]
    return ["## Against FBGEMM", "", *_table(head, rows)]


def _mean_without(column: dict[str, float]) -> float | None:
    return store.geometric_mean([value for name, value in column.items() if name != WITHOUT])


_SUMMARIES: dict[str, Any] = {
    "geometric mean": lambda column: store.geometric_mean(list(column.values())),
    f"geometric mean without {WITHOUT}": _mean_without,
    "worst": lambda column: min(column.values(), default=None),
}


def _value(record: dict[str, Any], measure: str) -> str:
    if measure not in record["measures"]:
        return ""
    value = record["measures"][measure]
    return f"{microseconds(value['median'])} ± {microseconds((value['high'] - value['low']) / 2)}"


def _gpu_table(results: dict[str, Any]) -> list[str]:
    rows = []
    for name in _workloads(results):
        for record in store.records(results, workload=name):
            if "gpu_forward" not in record["measures"] or record["status"] != "ok":
                continue
            floors = store.floors(results, record)
            cells = []
            for direction in ("forward", "backward"):
                time = store.median(record, f"gpu_{direction}")
                share = f"{100 * floors[direction] / time:.0f} %" if time and direction in floors else ""
                cells += [_value(record, f"gpu_{direction}"), share]
            rows.append([name, name_of(record), *cells])
    head = ["workload", "provider", "forward us", "of the floor's speed", "backward us", "of the floor's speed"]
    return ["## GPU time", "", *_table(head, rows)] if rows else []


def _host_table(results: dict[str, Any]) -> list[str]:
    measures = ["wall_forward", "wall_backward", "wall_step", "host_forward", "host_backward"]
    measures += ["host_step_one_thread", "graph_forward", "graph_step"]
    rows = []
    for name in _workloads(results):
        for record in store.records(results, workload=name):
            if record["status"] != "ok" or not any(measure in record["measures"] for measure in measures):
                continue
            memory = record.get("memory")
            first = record.get("first_call")
            rows.append([
                name, name_of(record), *[_value(record, measure) for measure in measures],
                f"{memory['step'] / 1e6:,.0f}" if memory else "", _first_call(first),
            ])  # fmt: skip
    head = ["workload", "provider", *[measure.replace("_", " ") for measure in measures], "memory MB", "first call ms"]
    note = "First call: forward, backward, and how many entries Triton's cache on disk gained; 0 means it was warm."
    return ["## Wall, host and graph times, memory", "", note, "", *_table(head, rows)] if rows else []


def _first_call(first: dict[str, Any] | None) -> str:
    if first is None:
        return ""
    return f"{first['forward_ms']:,.0f}, {first['backward_ms']:,.0f}, +{first['compiled']}"


def _floor_table(results: dict[str, Any]) -> list[str]:
    rows = []
    for name in _workloads(results):
        for ids in ("int32", "int64"):
            counted = [r for r in store.records(results, workload=name, ids=ids) if "counts" in r]
            if not counted:
                continue
            counts = limits.Counts(**counted[0]["counts"])
            workload = Workload.from_dict(results["workloads"][name])
            model = limits.byte_model(workload, counts, ids)
            floors = store.floors(results, counted[0])
            rows.append([
                name, ids, f"{sum(counts.entries):,}", f"{sum(counts.distinct):,}", f"{model['forward'] / 1e6:,.1f}",
                microseconds(floors.get("forward")), microseconds(floors.get("lookup_through_l2")),
                f"{model['backward'] / 1e6:,.1f}", microseconds(floors.get("backward")),
                microseconds(floors.get("gradient_through_l2")),
            ])  # fmt: skip
    head = ["workload", "ids", "ids of a request", "distinct rows", "forward MB", "floor us", "lookups through L2 us"]
    head += ["backward MB", "floor us", "gradients through L2 us"]
    note = "Through L2: for every id its row, or its gradient, at the L2's read bandwidth as `bench/limits.py` has it."
    return ["## Least bytes", "", note, "", *_table(head, rows)] if rows else []


LIMITS = """For the fastest dtype of ids. HBM and L2: the least time for the bytes, over the time measured; rows that
are found in an L1 can take the L2 over 100 %. From 70 % on the larger of the two is named as the limit; below it what
is left is latency and issue slots. The look at the offsets is a launch of its own before the gather.
"""
LIMITED = 0.7


def _limit_table(results: dict[str, Any]) -> list[str]:
    """Which limit fbtriton's forward sits at, workload by workload."""
    rows = []
    for name in _workloads(results):
        records = [
            record
            for record in store.records(results, workload=name)
            if record["provider"] == "fbtriton" and record["status"] == "ok" and "gpu_forward" in record["measures"]
        ]
        if not records or not results["copy_bandwidth"]:
            continue
        record = min(records, key=lambda record: float(record["measures"]["gpu_forward"]["median"]))
        time, floors = record["measures"]["gpu_forward"]["median"], store.floors(results, record)
        shares = {"HBM": floors["forward"] / time, "L2": floors["lookup_through_l2"] / time}
        kernels = {kernel["name"]: kernel["us"] for kernel in record["kernels"]["forward"]}
        limit = max(shares, key=shares.__getitem__)
        counted = "count_kernel" in kernels
        rows.append([
            name, microseconds(time), *[f"{100 * share:.0f} %" for share in shares.values()],
            microseconds(kernels.get("check_offsets_kernel")),
            "issue: counting" if counted else limit if shares[limit] >= LIMITED else "latency, issue",
        ])  # fmt: skip
    head = ["workload", "forward us", "HBM", "L2", "look at the offsets us", "limit"]
    return ["## What limits the forward", "", LIMITS, *_table(head, rows)] if rows else []


def _missing(results: dict[str, Any]) -> list[str]:
    lines: dict[str, list[str]] = {}
    for record in results["records"]:
        if record["workload"] not in _workloads(results):
            continue
        reasons = {record["status"]: record["reason"]} if record["status"] != "ok" else record["reasons"]
        for what, reason in reasons.items():
            label = "WRONG" if what == "wrong" else what
            lines.setdefault(f"{record['provider']}: {label}: {reason}", []).append(record["workload"])
    texts = [f"- {text} ({', '.join(dict.fromkeys(names))})" for text, names in lines.items()]
    return ["## What has no time, and why", "", *texts, ""] if texts else []


def _sources(results: dict[str, Any]) -> list[str]:
    lines = [f"- **{name}**: {results['workloads'][name]['source']}" for name in _workloads(results)]
    return ["## Workloads", "", "`python -m bench list` shows their sizes.", "", *lines, ""]


def markdown(results: dict[str, Any], files: list[str], images: list[str], others: list[str]) -> str:
    """The text of README.md; `others` are pages beside it."""
    lines = _head(results, files) + [MEASURES]
    if others:
        lines += ["Beside this page: " + ", ".join(f"[{name}]({name})" for name in others), ""]
    lines += _ratios(results)
    for name in images:
        lines += [f"![{IMAGES[name]}]({name})", ""]
    for part in (_gpu_table, _limit_table, _host_table, _floor_table, _missing, _sources):
        lines += part(results)
    return "\n".join(lines).rstrip() + "\n"


def write_report(loaded: list[dict[str, Any]], files: list[str], directory: Path) -> list[Path]:
    """README.md and the plots."""
    from bench.plots import write_plots

    results = store.merge(loaded)
    directory.mkdir(parents=True, exist_ok=True)
    images = write_plots(results, directory)
    readme = directory / "README.md"
    others = sorted(path.name for path in directory.glob("*.md") if path != readme)
    readme.write_text(markdown(results, files, [path.name for path in images], others))
    return [readme, *images]
