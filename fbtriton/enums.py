"""FBGEMM's enumerations, with its names and values, so that code for its class needs no FBGEMM.

`SplitTableBatchedEmbeddingBagsCodegen` takes members of these or of FBGEMM's own; it looks at their names only.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import torch


class EmbeddingLocation(enum.IntEnum):
    """Where a table lies."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4


class ComputeDevice(enum.IntEnum):
    """What computes."""

    CPU = 0
    CUDA = 1
    MTIA = 2


class PoolingMode(enum.IntEnum):
    """What becomes of the rows of a bag; NONE leaves them as they are."""

    SUM = 0
    MEAN = 1
    NONE = 2


class BoundsCheckMode(enum.IntEnum):
    """What happens to bad ids and offsets. V2 is another kernel of FBGEMM's with the same results."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


class CacheAlgorithm(enum.Enum):
    """Which rows a cache keeps. There is no cache here."""

    LRU = 0
    LFU = 1


class WeightDecayMode(enum.IntEnum):
    """How row-wise Adagrad decays weights."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2
    COUNTER = 3
    COWCLIP = 4
    DECOUPLE_GLOBAL = 5


class EmbOptimType(enum.Enum):
    """The fused optimizer."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    ROWWISE_RMSPROP_AR = "row_wise_rmsprop_ar"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


OptimType = EmbOptimType


class SparseType(enum.Enum):
    """A dtype of weights or outputs."""

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    NFP8 = "nfp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_dtype(dtype: torch.dtype) -> SparseType:
        """The member of float32, float16 or bfloat16; ValueError for any other dtype."""
        for name, known in FLOAT_DTYPES.items():
            if known == dtype:
                return SparseType[name]
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES.values()))}, got {dtype}")

    def as_dtype(self) -> torch.dtype:
        """The dtype of FP32, FP16 or BF16; ValueError for any other member."""
        if self.name not in FLOAT_DTYPES:
            raise ValueError(f"only {', '.join(FLOAT_DTYPES)} have a dtype here, got {self.name}")
        return FLOAT_DTYPES[self.name]

    def as_int(self) -> int:
        """FBGEMM's number of FP32, FP16 or BF16; ValueError for any other member."""
        return SPARSE_TYPE_NUMBERS[self.as_dtype()]


FLOAT_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
SPARSE_TYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 5}

Member = TypeVar("Member", bound=enum.Enum)


def member_of(kind: type[Member], name: str, value: Any) -> Member:
    """Our member with the name of `value`, a member of ours or of FBGEMM's enumeration; ValueError if there is none."""
    value_name = getattr(value, "name", None)
    if isinstance(value_name, str) and value_name in kind.__members__:
        return kind[value_name]
    raise ValueError(f"{name} must be a member of {kind.__name__} ({', '.join(kind.__members__)}), got {value!r}")
