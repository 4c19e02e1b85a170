"""The workloads, where each comes from, and the requests they are made of.

A workload is plain data: tables, features, batch, bag lengths and how skewed the ids are. `make_requests` draws
requests from a seed on any device; recorded traces are read instead (see `bench.traces`).
"""

from __future__ import annotations

import fnmatch
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ID_DTYPES = {"int32": torch.int32, "int64": torch.int64}
UNIFORM = 1.0  # alpha from which ids are skewed


class Request(NamedTuple):
    """One batch, feature-major."""

    indices: Tensor  # [N] int32 | int64
    offsets: Tensor  # [bags + 1], same dtype
    sample_weights: Tensor | None  # [N] fp32


@dataclass(frozen=True)
class Workload:
    """Tables, features, and how requests are drawn.

    Args:
        name: what `--workload` selects.
        rows, dims: for each table.
        batch: samples of a request.
        bags: for each feature the mean number of ids in a bag.
        source: where the numbers come from.
        feature_tables: the table of each feature; default one feature for each table.
        dtype: of the weights, "fp32", "fp16" or "bf16". Outputs and gradients are fp32.
        alpha: exponent of the bounded Pareto distribution of ids; 1 = uniform.
        fixed_bags: every bag has exactly the mean length; otherwise uniform between half and one and a half of it.
        weighted: with per-sample weights.
        pooling: "sum" or "mean".
        batch_sizes: a batch size for each feature (VBE), in place of `batch`.
        trace: a file of recorded requests, in place of random ones.
        group: "main", "tiny", "scaling" or "custom".
    """

    name: str
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    batch: int
    bags: tuple[float, ...]
    source: str
    feature_tables: tuple[int, ...] = ()
    dtype: str = "fp16"
    alpha: float = UNIFORM
    fixed_bags: bool = False
    weighted: bool = False
    pooling: str = "sum"
    batch_sizes: tuple[int, ...] | None = None
    trace: str | None = None
    group: str = "main"

    def __post_init__(self) -> None:
        if not self.feature_tables:
            object.__setattr__(self, "feature_tables", tuple(range(len(self.rows))))
        num_features = len(self.feature_tables)
        if len(self.rows) != len(self.dims):
            raise ValueError(f"workload {self.name}: {len(self.rows)} rows but {len(self.dims)} dims")
        for name in ("bags", "batch_sizes"):
            value = getattr(self, name)
            if value is not None and len(value) != num_features:
                raise ValueError(f"workload {self.name}: {name} needs {num_features} entries, got {len(value)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"workload {self.name}: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def samples(self) -> tuple[int, ...]:
        """The batch size of each feature."""
        return self.batch_sizes or (self.batch,) * len(self.feature_tables)

    @property
    def feature_dims(self) -> list[int]:
        return [self.dims[table] for table in self.feature_tables]

    @property
    def weight_bytes(self) -> int:
        """Weights and row-wise state."""
        size = DTYPES[self.dtype].itemsize
        return sum(rows * (dim * size + 4) for rows, dim in zip(self.rows, self.dims, strict=True))

    @property
    def expected_entries(self) -> int:
        return int(sum(samples * bag for samples, bag in zip(self.samples, self.bags, strict=True)))

    def split(self, output: Tensor) -> list[Tensor]:
        """The part [samples, dim] of each feature of an output [batch, columns], or of a flat one (VBE)."""
        if self.batch_sizes is None:
            return list(output.split(self.feature_dims, dim=1))
        sizes = [samples * dim for samples, dim in zip(self.samples, self.feature_dims, strict=True)]
        parts = output.flatten().split(sizes)
        return [part.view(-1, dim) for part, dim in zip(parts, self.feature_dims, strict=True)]

    @property
    def output_shape(self) -> tuple[int, ...]:
        if self.batch_sizes is None:
            return (self.batch, sum(self.feature_dims))
        return (sum(samples * dim for samples, dim in zip(self.samples, self.feature_dims, strict=True)),)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Workload:
        """The inverse of `to_dict`, also after JSON has made lists of tuples."""
        known = {field.name for field in fields(Workload)}
        unknown = set(values) - known
        if unknown:
            raise ValueError(f"unknown keys in a workload: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return Workload(**arguments)


def _alike(name: str, tables: int, rows: int, dim: int, batch: int, bag: float, source: str, **other: Any) -> Workload:
    """All tables alike."""
    return Workload(name, (rows,) * tables, (dim,) * tables, batch, (bag,) * tables, source, **other)


# The categorical features of the Criteo 1TB click logs, and the ids per feature of its synthetic multi-hot version.
CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
CRITEO_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
MLPERF = "MLPerf Training, DLRM-DCNv2 on Criteo 1TB multi-hot: num_embeddings_per_feature and multi_hot_sizes"

MIXED_DIMS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512)


def _dlrm_mix() -> Workload:
    """Rows spread evenly on a logarithmic scale, most features one-hot, few with long bags."""
    count = 48
    rows = [round(500 * 10_000 ** (((29 * i) % count) / (count - 1))) for i in range(count)]
    dims, bags = (32, 64, 64, 128), (1, 1, 2, 1, 5, 1, 10, 50)
    return Workload(
        "dlrm-mix",
        tuple(rows),
        tuple(dims[i % 4] for i in range(count)),
        8192,
        tuple(bags[(i // 3) % 8] for i in range(count)),
        "made for this table after the description of production models in Gupta et al., HPCA 2020 (RMC1 to RMC3):"
        " many tables of 500 to 5M rows, most features with one id, few with many",
        alpha=1.05,
    )


def _main() -> list[Workload]:
    return [
        _alike("fbgemm-default", 32, 100_000, 128, 512, 20, "defaults of FBGEMM's TBE device benchmark"),
        _alike("torchrec-2365", 16, 100_000, 128, 131_072, 10, "table of TorchRec pull request 2365"),
        _alike("fbgemm-ci-zipf", 1, 10_000_000, 256, 13_107, 55, "TBE microbenchmark of FBGEMM's CI", alpha=1.15),
        Workload("mlperf-dlrmv2", CRITEO_ROWS, (128,) * 26, 8192, CRITEO_BAGS, MLPERF, fixed_bags=True),
        Workload(
            "mlperf-dlrmv2-zipf", CRITEO_ROWS, (128,) * 26, 8192, CRITEO_BAGS, f"{MLPERF}; skewed ids",
            alpha=1.1, fixed_bags=True,
        ),
        _alike("fp32-uniform", 8, 1_000_000, 64, 16_384, 20, "made: fp32 weights, uniform ids", dtype="fp32"),
        Workload(
            "mixed-dims", (500_000,) * 24, MIXED_DIMS * 2, 8192, (8,) * 24, "made: twelve dims from 4 to 512",
            alpha=1.05,
        ),
        Workload(
            "small-long-bags", (64,) * 4 + (48,) * 4, (128,) * 8, 32_768, (200,) * 8,
            "made: the regime of the histogram path in TorchRec's Triton TBE, at most 64 rows and dims 64 to 128",
        ),
        Workload(
            "table-sharing", (2_000_000, 500_000), (64, 256), 65_536, (7,) * 20,
            "made: features that share tables, as in TorchRec pull request 4612",
            feature_tables=(0,) * 16 + (1,) * 4, alpha=1.05,
        ),
        _alike("long-runs", 8, 1000, 128, 32_768, 30, "made: hot rows, each looked up many times", alpha=1.2),
        _alike(
            "weighted", 10, 1_000_000, 128, 16_384, 30, "made: per-sample weights, no gradient for them",
            alpha=1.05, weighted=True,
        ),
        Workload(
            "vbe", (500_000,) * 16, (64, 128) * 8, 16_384, (20,) * 16,
            "made: variable batch sizes as TorchRec's deduplicated features have them, a batch of 16,384 cut to"
            " a half, a quarter and an eighth",
            alpha=1.05, batch_sizes=(16_384, 8192, 4096, 2048) * 4,
        ),
        Workload(
            "odd-dims", (200_000,) * 7, (1, 1, 3, 10, 17, 50, 127), 8192, (1, 20, 10, 10, 10, 10, 10),
            "made: D = 1 as the wide part of wide and deep models needs (TorchRec issue 1495), and odd dims",
            alpha=1.05,
        ),
        _dlrm_mix(),
    ]  # fmt: skip


def _tiny() -> list[Workload]:
    tiny: dict[str, Any] = {"group": "tiny"}
    return [
        Workload("tiny", (40, 25, 60), (8, 16, 4), 6, (3, 2, 4), "a few bags, for CI", dtype="fp32", **tiny),
        Workload(
            "tiny-weighted", (50, 30), (8, 16), 8, (3, 4, 2), "shared tables, fp16, per-sample weights, for CI",
            feature_tables=(0, 0, 1), alpha=1.2, weighted=True, **tiny,
        ),
        Workload("tiny-odd", (20, 30), (1, 3), 6, (3, 3), "D = 1 and 3, for CI", dtype="fp32", **tiny),
        Workload(
            "tiny-vbe", (40, 25), (8, 4), 8, (3, 2), "a batch size for each feature, for CI",
            dtype="fp32", batch_sizes=(8, 3), **tiny,
        ),
    ]  # fmt: skip


SCALING = {
    "batch": (512, 2048, 8192, 32_768),
    "bag": (1, 4, 16, 64),
    "alpha": (1.0, 1.05, 1.1, 1.2),
}


def _scaling() -> list[Workload]:
    """One quantity varies at a time around eight tables of a million rows, batch 8192, bags of 16, alpha 1.05."""
    middle: dict[str, Any] = {"batch": 8192, "bag": 16, "alpha": 1.05}
    return [
        _alike(
            f"scaling-{name}-{value:g}", 8, 1_000_000, 128, at["batch"], at["bag"], f"made: {name} varies",
            alpha=at["alpha"], group="scaling",
        )
        for name, values in SCALING.items()
        for value in values
        for at in [middle | {name: value}]
    ]  # fmt: skip


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in [*_main(), *_tiny(), *_scaling()]}


def select(patterns: list[str] | None, group: str = "main") -> list[Workload]:
    """The workloads whose names match one of the patterns ("tiny*"); default all of a group.

    Raises:
        ValueError: a pattern matches nothing.
    """
    if not patterns:
        return [workload for workload in WORKLOADS.values() if workload.group == group]
    chosen: dict[str, Workload] = {}
    for pattern in patterns:
        names = fnmatch.filter(WORKLOADS, pattern)
        if not names:
            raise ValueError(f"no workload is named {pattern!r}; python -m bench list shows them")
        chosen |= {name: WORKLOADS[name] for name in names}
    return list(chosen.values())


def _draw_ids(count: int, rows: int, alpha: float, generator: torch.Generator) -> Tensor:
    """Row numbers: uniform, or a bounded Pareto distribution by its inverse, scattered so that hot rows lie apart."""
    device = generator.device
    if alpha <= UNIFORM:
        return torch.randint(rows, (count,), generator=generator, device=device)
    exponent = alpha - 1
    uniform = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
    value = (1 - uniform * (1 - rows**-exponent)) ** (-1 / exponent)
    rank = (value.long() - 1).clamp_(0, rows - 1)
    return (rank * 2_654_435_761 + 97) % rows if rows > 4 else rank


def _draw_lengths(samples: int, mean: float, fixed: bool, generator: torch.Generator) -> Tensor:
    if fixed:
        return torch.full((samples,), round(mean), device=generator.device)
    low, high = int(mean) // 2, int(mean) + (int(mean) + 1) // 2
    return torch.randint(low, high + 1, (samples,), generator=generator, device=generator.device)


def make_request(workload: Workload, seed: int, device: torch.device, ids: torch.dtype) -> Request:
    """Random ids and bag lengths; the same seed and device kind give the same request."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths, indices = [], []
    for feature, table in enumerate(workload.feature_tables):
        samples, bag = workload.samples[feature], workload.bags[feature]
        lengths.append(_draw_lengths(samples, bag, workload.fixed_bags, generator))
        indices.append(_draw_ids(int(lengths[-1].sum()), workload.rows[table], workload.alpha, generator).to(ids))
    all_lengths = torch.cat(lengths)
    offsets = torch.zeros(all_lengths.numel() + 1, dtype=torch.int64, device=device)
    torch.cumsum(all_lengths, 0, out=offsets[1:])
    count = sum(part.numel() for part in indices)
    weights = torch.rand(count, generator=generator, device=device) if workload.weighted else None
    return Request(torch.cat(indices), offsets.to(ids), weights)


def make_requests(workload: Workload, count: int, seed: int, device: torch.device, ids: str) -> list[Request]:
    """Distinct requests: drawn, or read from the workload's trace (then at most as many as it has)."""
    if workload.trace is not None:
        from bench.traces import read_requests

        return read_requests(workload, count, device, ID_DTYPES[ids])
    return [make_request(workload, 1000 * seed + number, device, ID_DTYPES[ids]) for number in range(count)]
