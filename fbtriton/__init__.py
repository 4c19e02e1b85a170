"""Table batched embeddings for recommendation models, in Triton."""

from fbtriton.bounds_check import BoundsReport
from fbtriton.enums import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    OptimType,
    PoolingMode,
    SparseType,
    WeightDecayMode,
)
from fbtriton.fbgemm_api import SplitTableBatchedEmbeddingBagsCodegen
from fbtriton.functional import table_batched_embedding_bags
from fbtriton.layout import Table
from fbtriton.module import TableBatchedEmbeddingBags
from fbtriton.optim import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    LarsSGD,
    NoOptimizer,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
)
from fbtriton.spec import OperatorSpec

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "BoundsCheckMode",
    "BoundsReport",
    "ComputeDevice",
    "EmbOptimType",
    "EmbeddingLocation",
    "Lamb",
    "LarsSGD",
    "NoOptimizer",
    "OperatorSpec",
    "OptimType",
    "PartialRowwiseAdam",
    "PartialRowwiseLamb",
    "PoolingMode",
    "RowwiseAdagrad",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "Table",
    "TableBatchedEmbeddingBags",
    "WeightDecayMode",
    "table_batched_embedding_bags",
]
__version__ = "0.1.0"
