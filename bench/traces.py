"""Workloads from files, and recorded requests.

A YAML or JSON file describes a workload in the words of `Workload`; numbers may stand for lists of equal numbers:

    name: my-model
    rows: [100000, 5000, 1000000]
    dims: 64                # all tables alike
    batch: 2048
    bags: [1, 20, 5]        # mean ids in a bag, for each feature
    dtype: fp16
    alpha: 1.1              # 1 = uniform ids
    trace: trace.npz        # instead of random ids; relative to this file

`tables: 8` says how many if every number stands for all. A recorded `.npz` describes itself and is a workload too.
A trace is a `.npz` with indices_0, offsets_0, and sample_weights_0 if there are any, then indices_1 and so on, or
a `.pt` with a list of dicts with the keys indices, offsets and sample_weights.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.workloads import DTYPES, Request, Workload

SUFFIXES = (".yaml", ".yml", ".json", ".npz", ".pt")


def is_file(text: str) -> bool:
    """Whether what a user calls a workload names a file."""
    return Path(text).suffix in SUFFIXES


def load_workload(path: Path) -> Workload:
    """A workload from a YAML or JSON file or a recorded `.npz`.

    Raises:
        ValueError: the file lacks something or says something unknown.
    """
    if not path.exists():
        raise ValueError(f"workload file {path} does not exist")
    if path.suffix == ".npz":
        with np.load(path) as archive:
            if "workload" not in archive:
                raise ValueError(f"{path} does not describe its tables; name it as `trace:` in a YAML file that does")
            values = json.loads(str(archive["workload"]))
        return Workload.from_dict(values | {"name": path.stem, "trace": str(path.resolve())})
    if path.suffix == ".pt":
        raise ValueError(f"{path} does not describe its tables; name it as `trace:` in a YAML file that does")
    if path.suffix == ".json":
        values = json.loads(path.read_text())
    else:
        import yaml

        values = yaml.safe_load(path.read_text())
    return _complete(values, path)


def _complete(values: dict[str, Any], path: Path) -> Workload:
    """Fill in what a file may leave out."""
    values = {"name": path.stem, "source": str(path), "group": "custom"} | values
    count = values.pop("tables", None)
    for name in ("rows", "dims"):
        if isinstance(values.get(name), list):
            count = len(values[name])
    if count is None or "rows" not in values or "dims" not in values:
        raise ValueError(f"{path} must give rows and dims, as lists or as numbers beside `tables`")
    features = values.get("feature_tables") or list(range(count))
    for name, length in (("rows", count), ("dims", count), ("bags", len(features))):
        if isinstance(values.get(name), (int, float)):
            values[name] = [values[name]] * length
    if values.get("trace"):
        trace = Path(path.parent / values["trace"]).resolve()
        first = _read_arrays(trace)[0]
        bags = first["offsets"].numel() - 1
        values |= {"trace": str(trace)}
        values.setdefault("batch", bags // len(features))
        values.setdefault("bags", [first["indices"].numel() / max(bags, 1)] * len(features))
        values.setdefault("weighted", first.get("sample_weights") is not None)
    if values.get("batch_sizes"):
        values.setdefault("batch", max(values["batch_sizes"]))
    for name in ("batch", "bags"):
        if name not in values:
            raise ValueError(f"{path} must give {name}, or a trace")
    return Workload.from_dict(values)


def _read_arrays(path: Path) -> list[dict[str, Any]]:
    """The requests of a trace, as CPU tensors."""
    if not path.exists():
        raise ValueError(f"trace {path} does not exist")
    if path.suffix == ".pt":
        loaded = torch.load(path, weights_only=True, map_location="cpu")
        return [loaded] if isinstance(loaded, dict) else list(loaded)
    requests: list[dict[str, Any]] = []
    with np.load(path) as archive:
        while f"indices_{len(requests)}" in archive:
            names = ("indices", "offsets", "sample_weights")
            keys = {name: f"{name}_{len(requests)}" for name in names}
            requests.append({n: torch.from_numpy(archive[key]) for n, key in keys.items() if key in archive})
    if not requests:
        raise ValueError(f"trace {path} holds no indices_0 and offsets_0")
    return requests


def read_requests(workload: Workload, count: int, device: torch.device, ids: torch.dtype) -> list[Request]:
    """The first requests of the workload's trace."""
    assert workload.trace is not None
    requests = []
    for arrays in _read_arrays(Path(workload.trace))[:count]:
        if arrays["offsets"].numel() != sum(workload.samples) + 1:
            raise ValueError(
                f"{workload.trace}: offsets need {sum(workload.samples) + 1} elements (one for each bag and one more),"
                f" got {arrays['offsets'].numel()}"
            )
        weights = arrays.get("sample_weights")
        requests.append(
            Request(
                arrays["indices"].to(device, ids),
                arrays["offsets"].to(device, ids),
                None if weights is None else weights.to(device, torch.float32),
            )
        )
    return requests


class Recording:
    """What `record` has collected: one dict of arrays for each forward."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.requests: list[dict[str, np.ndarray]] = []
        self.batch_sizes: list[int] | None = None

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook. Copies to the host, so it waits for the device."""
        if len(self.requests) >= self.limit:
            return
        names = ("indices", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | kwargs
        arrays = {
            name.replace("per_", ""): value.detach().cpu().numpy()
            for name in names
            if isinstance(value := given.get(name), Tensor)
        }
        sizes = given.get("batch_sizes") or given.get("batch_size_per_feature_per_rank")
        if sizes is not None:
            self.batch_sizes = [sum(feature) for feature in sizes]
        self.requests.append(arrays)


def _describe_module(module: Any) -> dict[str, Any]:
    """Tables and features of fbtriton's module or of FBGEMM's."""
    if hasattr(module, "spec"):
        tables, features, pooling = module.spec.tables, module.spec.feature_tables, module.spec.pooling
        dtype = module.spec.torch_weights_dtype
    elif hasattr(module, "embedding_specs"):
        tables = [(spec[0], spec[1]) for spec in module.embedding_specs]
        features, pooling = module.feature_table_map, module.pooling_mode.name.lower()
        dtype = module.split_embedding_weights()[0].dtype
    else:
        raise ValueError(f"record needs a TBE of fbtriton or FBGEMM, got {type(module).__name__}")
    return {
        "rows": [rows for rows, _ in tables],
        "dims": [dim for _, dim in tables],
        "feature_tables": list(features),
        "pooling": pooling,
        "dtype": next(name for name, known in DTYPES.items() if known == dtype),
    }


def _describe(module: Any, recording: Recording) -> dict[str, Any]:
    values = _describe_module(module)
    first = recording.requests[0]
    features = len(values["feature_tables"])
    sizes = recording.batch_sizes
    batch = max(sizes) if sizes else (len(first["offsets"]) - 1) // features
    ends = np.cumsum([0, *(sizes or [batch] * features)])
    ids = np.diff(first["offsets"][ends])
    bags = [float(n) / max(1, size) for n, size in zip(ids, sizes or [batch] * features, strict=True)]
    values |= {"batch": batch, "bags": bags, "batch_sizes": sizes, "weighted": "sample_weights" in first}
    return values | {"name": "recorded", "source": "recorded from a live module", "group": "custom"}


@contextlib.contextmanager
def record(module: Any, path: str | Path, limit: int = 8) -> Iterator[Recording]:
    """Save the first requests of a live TBE to a `.npz` that `python -m bench run --workload FILE` replays.

    Args:
        module: a TBE of fbtriton or of FBGEMM, wherever it sits in a model.
        path: the file to write when the context ends.
        limit: how many requests to keep. Their batch sizes must agree.
    """
    recording = Recording(limit)
    _describe_module(module)
    handle = module.register_forward_pre_hook(recording, with_kwargs=True)
    try:
        yield recording
    finally:
        handle.remove()
    if recording.requests:
        numbered = enumerate(recording.requests)
        arrays = {f"{name}_{i}": value for i, request in numbered for name, value in request.items()}
        np.savez_compressed(path, workload=json.dumps(_describe(module, recording)), **arrays)  # type: ignore[arg-type]
