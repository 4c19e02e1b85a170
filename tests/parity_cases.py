"""Cases and batches that the tests against other implementations share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fbtriton.layout import Table
from fbtriton.module import TableBatchedEmbeddingBags
from fbtriton.optim import Optimizer
from fbtriton.testing import Batch, make_batch


@dataclass(frozen=True)
class Case:
    """What is fixed at construction.

    The grids leave out what the other side lacks or is known to do otherwise: ids of -1, padding and bad
    input; the weighted mean (nn.EmbeddingBag has none, gradients of FBGEMM's lack the division by the bag's
    length); batch sizes for each feature; stochastic rounding; against FBGEMM also bf16 weights and dims
    that are not multiples of 4. Nor are there fp16 and bf16 outputs, which only round once more, or tables
    without rows.
    """

    optimizer: Optimizer
    pooling: str
    weighted: bool
    shared: bool
    weights_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        optimizer = "-".join(map(str, [self.optimizer.name, *self.optimizer.hyperparameters]))
        kind = "weighted" if self.weighted else self.pooling
        sharing = "shared" if self.shared else "apart"
        return f"{optimizer}-{kind}-{sharing}-{self.weights_dtype}-{self.index_dtype}".replace("torch.", "")


@dataclass(frozen=True)
class Shape:
    """The tables and the batches, and where they lie."""

    device: str
    tables: tuple[tuple[int, int], ...]  # (rows, dim)
    shared_map: tuple[int, ...]  # feature_table_map of the cases that share tables
    batch_size: int
    max_length: int  # bags hold 0 to this many ids
    longest_run: int = 1  # each feature looks up row 0 at least this often


ODD_DIMS = Shape("cpu", ((400, 3), (300, 1), (200, 8)), (0, 1, 2, 0, 1), 16, 10)
# FBGEMM on the CPU merges the features of a table only if they are neighbours; otherwise it updates a row
# once for each of them, or raises. On CUDA they lie apart, and FBGEMM cuts runs of more than 1024 entries
# into pieces that are summed with atomics.
ON_CPU = Shape("cpu", ((200, 4), (50, 16), (31, 64)), (0, 0, 1, 2, 2), 16, 10)
CUDA_TABLES = ((50_000, 4), (100_000, 64), (10_000, 128), (1_000, 256))
ON_CUDA = Shape("cuda", CUDA_TABLES, (0, 1, 2, 3, 1, 0), 512, 40, longest_run=1025)
# Without pooling all tables have one dim.
ONE_DIM_ON_CPU = Shape("cpu", ((200, 16), (50, 16), (31, 16)), (0, 0, 1, 2, 2), 16, 10)
ONE_DIM_ON_CUDA = Shape("cuda", tuple((rows, 64) for rows, _ in CUDA_TABLES), (0, 1, 2, 3, 1, 0), 512, 40, 1025)

POOLINGS = [("sum", False), ("mean", False), ("sum", True)]  # (pooling, weighted)
LR = 2.0**-5  # the same number in fp32 and fp64
SMALL_LR = 2.0**-8  # times the fp32 error of a long sum it is below the smallest spacing of fp16


def make_module(case: Case, shape: Shape, seed: int) -> TableBatchedEmbeddingBags:
    torch.manual_seed(seed)
    module = TableBatchedEmbeddingBags(
        [Table(rows, dim) for rows, dim in shape.tables],
        optimizer=case.optimizer,
        feature_table_map=shape.shared_map if case.shared else None,
        pooling=case.pooling,
        weights_dtype=case.weights_dtype,
        stochastic_rounding=False,
        device=shape.device,
    )
    return module.init_uniform_(-1, 1)


def make_step(case: Case, shape: Shape, module: TableBatchedEmbeddingBags, seed: int) -> tuple[Batch, Tensor]:
    """A batch and the gradient of its output. Each feature's first and last bag are empty, others may be."""
    generator = torch.Generator().manual_seed(seed)
    rows = [shape.tables[table][0] for table in module.spec.feature_tables]
    lengths = torch.randint(0, shape.max_length + 1, (len(rows), shape.batch_size), generator=generator)
    lengths[:, [0, -1]] = 0
    options = {"index_dtype": case.index_dtype, "offset_dtype": case.index_dtype, "device": shape.device}
    batch = make_batch(rows, lengths, seed=seed, weighted=case.weighted, hot=0.2, **options)
    runs = [int((ids == 0).sum()) for ids in batch.indices.split(lengths.sum(dim=1).tolist())]
    assert min(runs) >= shape.longest_run, f"row 0 is looked up {runs} times, not {shape.longest_run}"
    if case.pooling == "none":
        size = (batch.indices.numel(), module.spec.layout.dims[0])
    else:
        size = (shape.batch_size, module.spec.layout.columns[-1])
    grad_output = torch.rand(size, generator=generator) * 2 - 1
    return batch, grad_output.to(shape.device)
