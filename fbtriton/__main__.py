"""`python -m fbtriton info`: what a bug report needs."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fbtriton
from fbtriton import tlx
from fbtriton._triton import HAS_TRITON
from fbtriton.backward.sort import describe_backend
from fbtriton.config import INTERPRET, Target, target_of
from fbtriton.forward.routing import plan, plan_for_gpu
from fbtriton.spec import OperatorSpec

EXAMPLE = OperatorSpec(
    tables=((100_000, 128), (1000, 64)),
    feature_tables=(0, 1),
    pooling="sum",
    weights_dtype="float16",
    output_dtype="float32",
    optimizer="rowwise_adagrad",
    stochastic_rounding=True,
    bounds_check="warning",
)


EXAMPLE_GPU = "NVIDIA H200"  # whose routes are shown where there is no GPU
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
WORKLOAD_KEYS = (
    "name", "source", "tables", "rows", "dims", "feature_tables", "batch", "batch_sizes", "bags", "dtype", "pooling",
    "weighted", "alpha", "fixed_bags", "trace", "group",
)  # fmt: skip


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def _triton_version() -> str:
    if not HAS_TRITON:
        return "not installed: CPU tensors only"
    import triton

    return triton.__version__ + (" (TRITON_INTERPRET=1: kernels run in the interpreter)" if INTERPRET else "")


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none visible: CPU tensors run the PyTorch reference"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    capability = f"{properties.major}.{properties.minor}"
    count = torch.cuda.device_count()
    return (
        f"{count} x {properties.name}, compute capability {capability}, {properties.multi_processor_count}"
        f" multiprocessors, {memory:.0f} GiB, CUDA {torch.version.cuda}"
    )


def _tlx() -> str:
    if tlx.available():
        return f"available (fork {_version('fbtriton')}): used on sm_100 and later for long runs"
    return "not available: it comes with Meta's fork of Triton; sm_100 and later could use it"


def info() -> str:
    """Versions, GPU, TLX, sort and the kernel paths, one fact a line."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lines = {
        "fbtriton": fbtriton.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "Triton": _triton_version(),
        "NumPy": _version("numpy"),
        "FBGEMM": _version("fbgemm-gpu", "fbgemm-gpu-cpu"),
        "TorchRec": _version("torchrec"),
        "GPU": _gpu(),
        "TLX": _tlx(),
        "sort": describe_backend(device),
    }
    width = max(map(len, lines))
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
    tables = ", ".join(f"{rows} x {dim}" for rows, dim in EXAMPLE.tables)
    return f"{facts}\n\npaths for fp16 tables of {tables}:\n{plan(EXAMPLE, device)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"--workload must be a file that can be read, got {path}: {error.strerror}") from error
    if path.suffix == ".json":
        values = json.loads(text)
    else:
        try:
            import yaml
        except ImportError as error:
            raise ValueError(
                f"{path} is taken for YAML, which needs PyYAML (pip install pyyaml); or use JSON"
            ) from error
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict) or not {"rows", "dims"} <= set(values):
        raise ValueError(f"{path} must give rows and dims")
    if unknown := set(values) - set(WORKLOAD_KEYS):
        raise ValueError(f"{path} has unknown keys {', '.join(sorted(unknown))}; known: {', '.join(WORKLOAD_KEYS)}")
    return values


def _per(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] * count


def routes_of(path: Path, gpu: str | None) -> str:
    """The routes of a workload file of `bench` (YAML or JSON: rows, dims, bags, feature_tables, dtype, weighted ...).

    Raises:
        ValueError: the file cannot be read, lacks rows or dims, or has a key that is not known.
    """
    values = _read(path)
    tables = values.get("tables") or max(
        (len(v) for v in (values["rows"], values["dims"]) if isinstance(v, list)), default=1
    )
    feature_tables = tuple(values.get("feature_tables") or range(tables))
    bags = tuple(map(float, _per(values.get("bags", 20.0), len(feature_tables))))
    dtype = values.get("dtype", "fp16")
    if dtype not in DTYPES:
        raise ValueError(f"dtype of {path} must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if len(bags) != len(feature_tables):
        raise ValueError(
            f"bags of {path} must have one entry for each of {len(feature_tables)} features, got {len(bags)}"
        )
    for name in ("rows", "dims"):
        if len(_per(values[name], tables)) != tables:
            raise ValueError(f"{name} of {path} must have one entry for each of {tables} tables")
    if not all(isinstance(table, int) and 0 <= table < tables for table in feature_tables):
        raise ValueError(f"feature_tables of {path} must be table numbers in [0, {tables}), got {feature_tables}")
    spec = replace(
        EXAMPLE,
        tables=tuple(zip(_per(values["rows"], tables), _per(values["dims"], tables), strict=True)),
        feature_tables=feature_tables,
        pooling=values.get("pooling", "sum"),
        weights_dtype=DTYPES[dtype],
        bag_size_hints=bags if "bags" in values else (),
    )
    target = target_of(torch.device("cuda", 0)) if torch.cuda.is_available() else Target(EXAMPLE_GPU, 0)
    here, capability = target.name, target.capability if gpu in (None, target.name) else 0
    mean = sum(bags) / len(bags)
    routes = plan_for_gpu(
        spec, gpu or here, mean, weighted=bool(values.get("weighted")), vbe=bool(values.get("batch_sizes")),
        capability=capability,
    )  # fmt: skip
    return f"{path.name} on {gpu or here}, {mean:g} ids a bag on average:\n{routes}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fbtriton", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("info", help="print versions, GPU, and which kernels would run and why")
    command.add_argument("--workload", type=Path, metavar="FILE", help="print the routes of this workload instead")
    command.add_argument("--gpu", help=f"whose routes; default the GPU here, or {EXAMPLE_GPU}")
    args = parser.parse_args()
    try:
        print(routes_of(args.workload, args.gpu) if args.workload else info())
    except ValueError as error:
        command.error(str(error))


if __name__ == "__main__":
    main()
