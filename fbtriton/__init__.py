"""Table batched embeddings for recommendation models, in Triton."""

from fbtriton.bounds_check import BoundsReport
from fbtriton.functional import table_batched_embedding_bags
from fbtriton.layout import OperatorSpec, Table
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

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "BoundsReport",
    "Lamb",
    "LarsSGD",
    "NoOptimizer",
    "OperatorSpec",
    "PartialRowwiseAdam",
    "PartialRowwiseLamb",
    "RowwiseAdagrad",
    "Table",
    "TableBatchedEmbeddingBags",
    "table_batched_embedding_bags",
]
__version__ = "0.1.0"
