"""Tables for the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import results as store

WIDTH = 190  # where standard output is not a terminal
NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}


def console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDTH)


def microseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def name_of(record: dict[str, Any]) -> str:
    """The provider with the options that make it this record."""
    return " ".join(filter(None, [record["provider"], record["ids"], record["setting"]]))


def _with_spread(record: dict[str, Any], measure: str) -> str:
    if measure not in record["measures"]:
        return ""
    value = record["measures"][measure]
    half = (value["high"] - value["low"]) / 2
    return f"{microseconds(value['median'])} ±{half:.{1 if half < 100 else 0}f}"


def _of_floor(floors: dict[str, float], record: dict[str, Any], direction: str) -> str:
    value = store.median(record, f"gpu_{direction}")
    return f"{value / floors[direction]:.1f}x" if value and direction in floors else ""


def main_table(results: dict[str, Any]) -> Table:
    """GPU time beside its floor, then wall, host and graph times, for every record."""
    gpu = results["machine"]["gpu"]
    table = Table(title=f"{results['machine']['name']}, microseconds; x = times the floor of the byte model")
    table.add_column("workload", no_wrap=True)
    table.add_column("provider", no_wrap=True)
    for name in ("GPU fwd", "x", "GPU bwd", "x", "wall fwd", "wall bwd", "wall both", "host fwd", "host bwd"):
        table.add_column(name, **NUMBER)
    for name in ("graph fwd", "graph both", "MB"):
        table.add_column(name, **NUMBER)
    previous = None
    for record in _ordered(results):
        if previous not in (None, record["workload"]):
            table.add_section()
        shown = record["workload"] if record["workload"] != previous else ""
        previous = record["workload"]
        if record["status"] != "ok":
            table.add_row(shown, name_of(record), f"[yellow]{_status(record)}[/yellow]")
            continue
        table.add_row(shown, name_of(record), *_times(results, record, gpu))
    return table


def _status(record: dict[str, Any]) -> str:
    return "WRONG" if record["status"] == "wrong" else record["status"]


def _times(results: dict[str, Any], record: dict[str, Any], gpu: bool) -> list[str]:
    floors = store.floors(results, record)
    none = "no GPU" if not gpu else ""

    def value(measure: str) -> str:
        return microseconds(store.median(record, measure)) or ("" if measure.startswith("wall") else none)

    cells = []
    for direction in ("forward", "backward"):
        cells += [_with_spread(record, f"gpu_{direction}") or none, _of_floor(floors, record, direction)]
    cells += [value(f"wall_{direction}") for direction in ("forward", "backward", "step")]
    cells += [value("host_forward"), value("host_backward"), value("graph_forward"), value("graph_step")]
    memory = record.get("memory")
    return [*cells, f"{memory['step'] / 1e6:,.0f}" if memory else none]


def _ordered(results: dict[str, Any]) -> list[dict[str, Any]]:
    names = list(results["workloads"])
    return sorted(results["records"], key=lambda record: names.index(record["workload"]))


def reasons_table(results: dict[str, Any]) -> Table | None:
    """Why something has no time; equal reasons of one workload and provider are put together."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for record in _ordered(results):
        which = " ".join(filter(None, [record["ids"], record["setting"]]))
        reasons = {record["status"]: record["reason"]} if record["status"] != "ok" else record["reasons"]
        for what, reason in reasons.items():
            if reason not in ("no GPU", "runs on the CPU"):
                label = "WRONG" if what == "wrong" else what
                rows.setdefault((record["provider"], f"{label}: {reason}", record["workload"]), []).append(which)
    if not rows:
        return None
    merged: dict[tuple[str, str], list[str]] = {}
    for (provider, reason, workload), options in rows.items():
        text = f"{workload} ({', '.join(options)})" if any(options) else workload
        merged.setdefault((provider, reason), []).append(text)
    table = Table(title="what has no time, and why")
    for name in ("provider", "reason", "workloads"):
        table.add_column(name)
    for (provider, reason), where in merged.items():
        table.add_row(provider, reason, "; ".join(where) if len(where) < 6 else f"{len(where)} workloads")
    return table


def ratios_table(results: dict[str, Any]) -> Table | None:
    """fbtriton against FBGEMM at its best, and the geometric means."""
    table = Table(title="times faster than FBGEMM at its best setting, same ids on both sides")
    table.add_column("workload", no_wrap=True)
    for name in ("GPU fwd", "GPU bwd", "GPU both", "wall both", "host both", "host both, one thread", "graph both"):
        table.add_column(name, **NUMBER)
    shown = False
    for workload in results["workloads"]:
        cells = []
        for kind, direction in store.RATIOS:
            found = store.speedup(results, workload, direction, kind=kind)
            cells.append(f"{found[0]:.2f} ({found[1]})" if found else "")
        shown |= any(cells)
        table.add_row(workload, *cells)
    table.add_section()
    table.add_row("geometric mean", *[_mean(results, kind, direction) for kind, direction in store.RATIOS])
    return table if shown else None


def _mean(results: dict[str, Any], kind: str, direction: str) -> str:
    found = [store.speedup(results, workload, direction, kind=kind) for workload in results["workloads"]]
    mean = store.geometric_mean([ratio[0] for ratio in found if ratio])
    return f"{mean:.2f}" if mean else ""


def compare_table(first: dict[str, Any], second: dict[str, Any]) -> Table:
    """B over A for every time that both have."""
    table = Table(title="B / A (and its spread); a difference within 3 % or 2 us is noise")
    for name in ("workload", "provider", "measure"):
        table.add_column(name, no_wrap=True)
    for name in ("A us", "B us", "B / A", ""):
        table.add_column(name, **NUMBER)
    for record in _ordered(first):
        key = {name: record[name] for name in ("workload", "provider", "ids", "setting")}
        others = store.records(second, **key)
        if not others:
            table.add_row(record["workload"], name_of(record), "only in A")
            continue
        if "ok" not in (record["status"], others[0]["status"]):
            continue
        if record["status"] != others[0]["status"]:
            table.add_row(record["workload"], name_of(record), f"{record['status']} -> {others[0]['status']}")
            continue
        for measure, a in record["measures"].items():
            if measure in others[0]["measures"]:
                _compare_row(table, record, measure, a, others[0]["measures"][measure])
    return table


def _compare_row(table: Table, record: dict[str, Any], measure: str, a: dict[str, float], b: dict[str, float]) -> None:
    ratio = b["median"] / a["median"] if a["median"] else float("nan")
    low, high = b["low"] / max(a["high"], 1e-9), b["high"] / max(a["low"], 1e-9)
    verdict = "[red]slower[/red]" if ratio > 1 else "[green]faster[/green]"
    if store.is_noise(a, b):
        verdict = "noise"
    elif low <= 1 <= high:
        verdict = "within the spread"
    table.add_row(
        record["workload"],
        name_of(record),
        measure.replace("_", " "),
        microseconds(a["median"]),
        microseconds(b["median"]),
        f"{ratio:.3f} ({low:.2f} to {high:.2f})",
        verdict,
    )
