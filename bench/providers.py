"""What is measured: fbtriton, FBGEMM, nn.EmbeddingBag with an optimizer, and the PyTorch reference.

All start from the same seed and do the same training step: row-wise Adagrad, bounds check on (mode "warning"),
stochastic rounding of fp16 weights, no gradient of the per-sample weights asked for. A provider is built, used and
dropped; two never stand beside each other.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.workloads import DTYPES, ID_DTYPES, Request, Workload

LEARNING_RATE = 0.05
EPS = 1e-8
LOW, HIGH = -1.0, 1.0  # of the initial weights

# A reference on a CPU is not asked for more than this; it would take minutes.
REFERENCE_ELEMENTS = 50_000_000
REFERENCE_WEIGHT_BYTES = 2**31


class UnsupportedError(Exception):
    """The provider says that it cannot do this workload."""


class Provider:
    """One implementation, with the tables of one workload."""

    settings: tuple[str, ...] = ("",)
    output_dtype = torch.float32
    grad_spacing = 0.0  # relative spacing of the dtype in which gradients are summed, where that is not fp32
    no_graph: str | None = None  # why the provider cannot be captured into a CUDA graph, where that is known

    def __init__(self, workload: Workload, ids: str, setting: str, device: torch.device, seed: int) -> None:
        self.workload = workload
        self.device = device

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Why the provider cannot be had here; None if it can."""
        return None

    def forward(self, request: Request) -> Tensor:
        raise NotImplementedError

    def backward(self, output: Tensor, grad: Tensor) -> None:
        """Differentiate and update the tables."""
        output.backward(grad)

    def tables(self) -> list[Tensor]:
        """A view [rows, dim] of each table."""
        raise NotImplementedError

    def states(self) -> list[Tensor]:
        """A view [rows] of each table's row-wise state."""
        raise NotImplementedError


class Fbtriton(Provider):
    """`fbtriton.TableBatchedEmbeddingBags`."""

    def __init__(self, workload: Workload, ids: str, setting: str, device: torch.device, seed: int) -> None:
        super().__init__(workload, ids, setting, device, seed)
        import fbtriton

        torch.manual_seed(seed)
        self.module = fbtriton.TableBatchedEmbeddingBags(
            [fbtriton.Table(rows, dim) for rows, dim in zip(workload.rows, workload.dims, strict=True)],
            optimizer=fbtriton.RowwiseAdagrad(LEARNING_RATE, eps=EPS),
            feature_table_map=list(workload.feature_tables),
            pooling=workload.pooling,
            weights_dtype=DTYPES[workload.dtype],
            stochastic_rounding=True,
            bounds_check="warning",
            device=device,
        ).init_uniform_(LOW, HIGH)

    def forward(self, request: Request) -> Tensor:
        if self.workload.batch_sizes is None:
            return self.module(*request)
        return self.module(*request, batch_sizes=[[size] for size in self.workload.batch_sizes])

    def tables(self) -> list[Tensor]:
        return self.module.split_embedding_weights()

    def states(self) -> list[Tensor]:
        return [states[0] for states in self.module.split_optimizer_states()]


class Reference(Fbtriton):
    """The PyTorch reference inside fbtriton, on CPU tensors."""

    def __init__(self, workload: Workload, ids: str, setting: str, device: torch.device, seed: int) -> None:
        elements = workload.expected_entries * max(workload.dims)
        if elements > REFERENCE_ELEMENTS or workload.weight_bytes > REFERENCE_WEIGHT_BYTES:
            raise UnsupportedError(
                f"too large for the reference on a CPU: {workload.expected_entries:,} ids,"
                f" {workload.weight_bytes / 1e9:.1f} GB of weights"
            )
        super().__init__(workload, ids, setting, torch.device("cpu"), seed)
        from fbtriton.config import kernels_on_cpu

        self.kernels_on_cpu = kernels_on_cpu

    def forward(self, request: Request) -> Tensor:
        token = self.kernels_on_cpu.set(False)
        try:
            return super().forward(request)
        finally:
            self.kernels_on_cpu.reset(token)

    def backward(self, output: Tensor, grad: Tensor) -> None:
        token = self.kernels_on_cpu.set(False)
        try:
            super().backward(output, grad)
        finally:
            self.kernels_on_cpu.reset(token)


FBGEMM_OPS = "fbgemm_gpu.split_table_batched_embeddings_ops_training"


class Fbgemm(Provider):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`, with both versions of its bounds check."""

    settings = ("v1", "v2")

    @staticmethod
    def missing(device: torch.device) -> str | None:
        try:
            package = importlib.import_module("fbgemm_gpu")
            importlib.import_module(FBGEMM_OPS)
        except (ImportError, OSError) as error:
            return f"fbgemm_gpu cannot be imported: {error}"
        if device.type == "cuda" and getattr(package, "__variant__", None) == "cpu":
            return "fbgemm_gpu is a build for the CPU"
        return None

    def __init__(self, workload: Workload, ids: str, setting: str, device: torch.device, seed: int) -> None:
        super().__init__(workload, ids, setting, device, seed)
        ops: Any = importlib.import_module(FBGEMM_OPS)
        os.environ.pop("FBGEMM_TBE_BOUNDS_CHECK_MODE", None)  # it would override the setting
        location, compute = ("DEVICE", "CUDA") if device.type == "cuda" else ("HOST", "CPU")
        place = ops.EmbeddingLocation[location], ops.ComputeDevice[compute]
        mode = "V2_WARNING" if setting == "v2" else "WARNING"
        self.module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place) for rows, dim in zip(workload.rows, workload.dims, strict=True)],
            feature_table_map=list(workload.feature_tables),
            weights_precision=ops.SparseType.from_dtype(DTYPES[workload.dtype]),
            output_dtype=ops.SparseType.FP32,
            optimizer=ops.OptimType.EXACT_ROWWISE_ADAGRAD,
            stochastic_rounding=True,
            learning_rate=LEARNING_RATE,
            eps=EPS,
            pooling_mode=ops.PoolingMode[workload.pooling.upper()],
            bounds_check_mode=ops.BoundsCheckMode[mode],
            device=device,
            embedding_table_index_type=ID_DTYPES[ids],
            embedding_table_offset_type=ID_DTYPES[ids],
        )
        torch.manual_seed(seed)
        with torch.no_grad():
            for view in self.module.split_embedding_weights():
                view.uniform_(LOW, HIGH)

    def forward(self, request: Request) -> Tensor:
        sizes = self.workload.batch_sizes
        if sizes is None:
            return self.module(*request)
        return self.module(*request, batch_size_per_feature_per_rank=[[size] for size in sizes])

    def tables(self) -> list[Tensor]:
        return [view.detach() for view in self.module.split_embedding_weights()]

    def states(self) -> list[Tensor]:
        return [states[0].flatten() for states in self.module.split_optimizer_states()]


class EmbeddingBag(Provider):
    """What `nn.EmbeddingBag` does, with sparse gradients, one table after the other; then row-wise Adagrad in PyTorch.

    Outputs and gradients have the dtype of the weights, and rows are rounded to nearest: for scale, not for a ratio.
    """

    no_graph = "coalescing sparse gradients waits for the device"

    def __init__(self, workload: Workload, ids: str, setting: str, device: torch.device, seed: int) -> None:
        super().__init__(workload, ids, setting, device, seed)
        if workload.weighted and workload.pooling != "sum":
            raise UnsupportedError("nn.EmbeddingBag takes per-sample weights only for sums")
        self.output_dtype = DTYPES[workload.dtype]
        self.grad_spacing = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}[workload.dtype]
        self.weights, self.sums = [], []
        torch.manual_seed(seed)
        for rows, dim in zip(workload.rows, workload.dims, strict=True):
            weight = torch.empty(rows, dim, dtype=self.output_dtype, device=device).uniform_(LOW, HIGH)
            self.weights.append(weight.requires_grad_())
            self.sums.append(torch.zeros(rows, device=device))
        self._bounds: dict[int, list[int]] = {}

    def _entry_bounds(self, offsets: Tensor) -> list[int]:
        """Where each feature's ids start. Read from the device once for each request, as a data loader knows it."""
        key = offsets.data_ptr()
        if key not in self._bounds:
            ends = torch.tensor([0, *self.workload.samples]).cumsum(0)
            self._bounds[key] = offsets.cpu()[ends].tolist()
        return self._bounds[key]

    def forward(self, request: Request) -> Tensor:
        outputs, bag = [], 0
        bounds = self._entry_bounds(request.offsets)
        for feature, table in enumerate(self.workload.feature_tables):
            entries = slice(bounds[feature], bounds[feature + 1])
            samples = self.workload.samples[feature]
            weights = request.sample_weights
            outputs.append(
                F.embedding_bag(
                    request.indices[entries],
                    self.weights[table],
                    request.offsets[bag : bag + samples + 1] - bounds[feature],
                    mode=self.workload.pooling,
                    sparse=True,
                    per_sample_weights=None if weights is None else weights[entries].to(self.output_dtype),
                    include_last_offset=True,
                )
            )
            bag += samples
        if self.workload.batch_sizes is None:
            return torch.cat(outputs, dim=1)
        return torch.cat([output.flatten() for output in outputs])

    @torch.no_grad()
    def _step(self) -> None:
        for weight, total in zip(self.weights, self.sums, strict=True):
            assert weight.grad is not None
            sparse = weight.grad.coalesce()
            rows, grad = sparse.indices()[0], sparse.values().float()
            total[rows] += grad.square().mean(dim=1)
            weight[rows] = (weight[rows].float() - LEARNING_RATE * grad / (total[rows].sqrt() + EPS)[:, None]).to(
                weight.dtype
            )
            weight.grad = None

    def backward(self, output: Tensor, grad: Tensor) -> None:
        output.backward(grad)
        self._step()

    def tables(self) -> list[Tensor]:
        return [weight.detach() for weight in self.weights]

    def states(self) -> list[Tensor]:
        return self.sums


PROVIDERS: dict[str, type[Provider]] = {
    "fbtriton": Fbtriton,
    "fbgemm": Fbgemm,
    "embedding-bag": EmbeddingBag,
    "reference": Reference,
}
BASE = "fbtriton-base"  # a second copy of fbtriton, in a process whose path starts with its directory
DESCRIPTIONS = {
    "fbtriton": "this library",
    "fbgemm": "FBGEMM's TBE, bounds check versions 1 and 2",
    "embedding-bag": "F.embedding_bag with sparse gradients and row-wise Adagrad in PyTorch, for scale",
    "reference": "the PyTorch reference inside fbtriton, on CPU tensors, for scale",
    BASE: "another copy of fbtriton, with --base DIR",
}


def provider_class(name: str) -> type[Provider]:
    return PROVIDERS["fbtriton" if name == BASE else name]
