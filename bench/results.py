"""Result files: what one run measured, where, with what. Written again after every workload.

    {"schema": 1, "command", "date", "commit", "sources", "versions", "machine", "options",
     "copy_bandwidth": {"median", "low", "high"} in bytes/s or null,
     "workloads": {name: its definition},
     "records": [{"workload", "provider", "ids", "setting", "status", "reason",
                  "measures": {"gpu_forward": {"median", "low", "high", "n"} in us, ...},
                  "reasons": {"graph": why it is missing, ...},
                  "kernels": {"forward": [{"name", "us", "launches"}], "backward": [...]},
                  "memory" in bytes, "first_call", "counts"}]}

status is ok, unsupported, missing, wrong, failed or skipped; all but ok have a reason and no times.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench import limits
from bench.providers import BASE
from bench.workloads import Workload

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
NOISE_SHARE = 0.03  # two runs agree within this share,
NOISE_US = 2.0  # or within this many microseconds
DIRECTIONS = ("forward", "backward", "step")
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu,driver_version"

# The times of which ratios to FBGEMM are shown.
RATIOS = [
    ("gpu", "forward"),
    ("gpu", "backward"),
    ("gpu", "step"),
    ("wall", "step"),
    ("host", "step"),
    ("host", "step_one_thread"),
    ("graph", "step"),
]


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _fbtriton_version() -> str:
    text = (ROOT / "fbtriton" / "__init__.py").read_text()
    found = re.search(r'__version__ = "(.*)"', text)
    return found.group(1) if found else "unknown"


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton", "fbtriton"),
        "fbtriton": _fbtriton_version(),
        "fbgemm": _version("fbgemm-gpu", "fbgemm-gpu-cpu"),
        "numpy": _version("numpy"),
    }


def machine() -> dict[str, Any]:
    """The GPU, or the processor where there is none. Host names and the like stay out."""
    if not torch.cuda.is_available():
        return {"name": "CPU", "slug": "cpu", "processor": platform.machine(), "gpu": False}
    properties = torch.cuda.get_device_properties(0)
    slug = re.sub(r"[^a-z0-9]+", "-", properties.name.lower()).strip("-")
    return {
        "name": properties.name,
        "slug": slug,
        "gpu": True,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def clocks() -> dict[str, str] | None:
    """What nvidia-smi reads; nothing is ever set."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    values = line.strip().splitlines()[0].split(", ")
    return dict(zip(CLOCKS.split(","), values, strict=False))


def commit() -> str:
    """The short hash of the checkout; "unknown" in a copy of the tree without its history."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return "unknown"


def sources_digest(root: Path = ROOT) -> str:
    """Names the measured code where no commit does: a hash of fbtriton's sources."""
    digest = hashlib.sha256()
    for path in sorted((root / "fbtriton").rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def without_folder(argument: str) -> str:
    """An absolute path as its last part: results name no machine's folders."""
    return Path(argument).name if argument.startswith("/") else argument


def pytest_outcomes(text: str) -> list[str]:
    """The last line of each run of pytest in its output, without its time."""
    return re.findall(r"^(\d+ (?:passed|failed).*?) in [\d.]+s", text, re.MULTILINE)


def new_results(commit_hash: str | None, options: dict[str, Any], workloads: Iterable[Workload]) -> dict[str, Any]:
    """A result without records."""
    arguments = [
        Path(sys.argv[0]).name if "bench" not in sys.argv[0] else "-m bench",
        *map(without_folder, sys.argv[1:]),
    ]
    return {
        "schema": SCHEMA,
        "command": " ".join(["python", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit_hash or commit(),
        "sources": sources_digest(),
        "versions": versions(),
        "machine": machine() | {"clocks_before": clocks()},
        "options": options,
        "copy_bandwidth": None,
        "workloads": {workload.name: workload.to_dict() for workload in workloads},
        "records": [],
    }


def default_path(results: dict[str, Any]) -> Path:
    date = results["date"].split()[0]
    return RESULTS / results["machine"]["slug"] / f"{date}-{results['commit']}.json"


def save(results: dict[str, Any], path: Path) -> None:
    """Replace the file in one step, so that an aborted run leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    head = json.dumps(results | {"records": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(record) for record in results["records"])
    part.write_text(head.replace('"records": []', f'"records": [\n{lines}\n ]', 1) + "\n")
    part.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file is of another schema."""
    results = json.loads(path.read_text())
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {results.get('schema')!r}, expected {SCHEMA}")
    return results


def record_of(results: dict[str, Any], workload: str, provider: str, ids: str, setting: str) -> dict[str, Any]:
    """The record with this key, made if need be."""
    key = {"workload": workload, "provider": provider, "ids": ids, "setting": setting}
    for record in results["records"]:
        if all(record[name] == value for name, value in key.items()):
            return record
    record = key | {"status": "ok", "reason": None, "measures": {}, "reasons": {}}
    results["records"].append(record)
    return record


def records(results: dict[str, Any], **key: str) -> list[dict[str, Any]]:
    """The records with these values of workload, provider, ids or setting."""
    return [r for r in results["records"] if all(r[name] == value for name, value in key.items())]


def median(record: dict[str, Any] | None, measure: str) -> float | None:
    """The median in us; None where it was not measured."""
    if record is None or record["status"] != "ok" or measure not in record["measures"]:
        return None
    return record["measures"][measure]["median"]


def best(candidates: list[dict[str, Any]], measure: str) -> dict[str, Any] | None:
    """The record with the least time."""
    timed = [record for record in candidates if median(record, measure) is not None]
    return min(timed, key=lambda record: median(record, measure) or math.inf, default=None)


def speedup(
    results: dict[str, Any], workload: str, direction: str, *, kind: str = "gpu", ids: str | None = None,
    provider: str = "fbtriton",
) -> tuple[float, str] | None:  # fmt: skip
    """How many times faster than FBGEMM, and the dtype of ids on both sides: the given one, or the one at which
    FBGEMM is fastest. FBGEMM's bounds check is the faster of its two versions."""
    measure = f"{kind}_{direction}"
    key = {"workload": workload} | ({"ids": ids} if ids else {})
    theirs = best(records(results, provider="fbgemm", **key), measure)
    if theirs is None:
        return None
    ours = best(records(results, provider=provider, workload=workload, ids=theirs["ids"]), measure)
    numerator, denominator = median(theirs, measure), median(ours, measure)
    if numerator is None or not denominator:
        return None
    return numerator / denominator, theirs["ids"]


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def floors(results: dict[str, Any], record: dict[str, Any]) -> dict[str, float]:
    """The floor in us of each direction, if counts and a copy bandwidth are there."""
    if not results["copy_bandwidth"] or "counts" not in record:
        return {}
    workload = Workload.from_dict(results["workloads"][record["workload"]])
    counts = limits.Counts(**record["counts"])
    model = limits.byte_model(workload, counts, record["ids"])
    bandwidth = results["copy_bandwidth"]["median"]
    found = {name: model[name] / bandwidth * 1e6 for name in ("forward", "backward")}
    found["step"] = found["forward"] + found["backward"]
    l2 = limits.L2_BANDWIDTH.get(results["machine"]["name"])
    if l2:
        found |= {f"{name}_through_l2": model[name] / l2 * 1e6 for name in ("lookup", "gradient")}
    return found


def merge(loaded: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of several from the same GPU: the first, with the records of later ones in place of its own."""
    merged = json.loads(json.dumps(loaded[0]))
    for other in loaded[1:]:
        if other["machine"]["name"] != merged["machine"]["name"]:
            raise ValueError(f"results of different GPUs: {merged['machine']['name']}, {other['machine']['name']}")
        merged["workloads"] |= other["workloads"]
        for record in other["records"]:
            key = (record["workload"], record["provider"], record["ids"], record["setting"])
            old = record_of(merged, *key)
            old.clear()
            old.update(record)
    return merged


def against_base(results: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The records of the other copy of fbtriton and of this one, as two results to compare."""
    other = [record | {"provider": "fbtriton"} for record in records(results, provider=BASE)]
    if not other:
        return None
    return results | {"records": other}, results | {"records": records(results, provider="fbtriton")}


def is_noise(a: dict[str, float], b: dict[str, float]) -> bool:
    """Whether two measures agree within 3 % or 2 us."""
    difference = abs(a["median"] - b["median"])
    return difference <= max(NOISE_US, NOISE_SHARE * min(a["median"], b["median"]))
