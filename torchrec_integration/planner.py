"""TorchRec's planner and FUSED_TRITON: sharders that offer it, constraints that ask for it, and what it is worth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType

from torchrec_integration import is_installed
from torchrec_integration.options import check_fused_params

FUSED, FUSED_TRITON = EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.FUSED_TRITON.value


class OffersFusedTriton:
    """Mixed into a sharder: the planner may choose FUSED_TRITON, and does so where nothing speaks for another kernel.

    `fused_params` are checked when the sharder is made.

    Raises:
        ValueError: fused_params has a value that cannot be honoured.
    """

    def __init__(self, fused_params: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        check_fused_params(fused_params)
        super().__init__(fused_params, *args, **kwargs)  # type: ignore[call-arg]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """FUSED_TRITON, then what TorchRec offers; for data parallelism only the latter."""
        others: list[str] = super().compute_kernels(sharding_type, compute_device_type)  # type: ignore[misc]
        return others if sharding_type == ShardingType.DATA_PARALLEL.value else [FUSED_TRITON, *others]

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """As TorchRec's. RuntimeError in a process where `torchrec_integration.install` was not called."""
        if not is_installed():
            raise RuntimeError(
                "torchrec_integration.install() must be called in every process that shards a model, before"
                " DistributedModelParallel; it was not called in this one"
            )
        return super().shard(*args, **kwargs)  # type: ignore[misc]


class TritonEmbeddingBagCollectionSharder(OffersFusedTriton, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, which also offers FUSED_TRITON."""


class TritonEmbeddingCollectionSharder(OffersFusedTriton, EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, which also offers FUSED_TRITON."""


def constraints_for(tables: Iterable[Any], compute_kernel: str = FUSED_TRITON, **more: Any) -> dict[str, Any]:
    """Constraints by which the planner chooses one compute kernel for these tables.

    Args:
        tables: EmbeddingBagConfig or EmbeddingConfig of each table, or its name.
        compute_kernel: "fused_triton" or another of TorchRec's compute kernels.
        more: other arguments of ParameterConstraints: sharding_types, output_dtype, stochastic_rounding,
            bounds_check_mode, ...

    Returns:
        ParameterConstraints by table name, for EmbeddingShardingPlanner.

    Raises:
        ValueError: TorchRec has no such compute kernel.
    """
    known = [kernel.value for kernel in EmbeddingComputeKernel]
    if compute_kernel not in known:
        raise ValueError(f"compute_kernel must be one of {', '.join(known)}, got {compute_kernel!r}")
    names = [table if isinstance(table, str) else table.name for table in tables]
    return {name: ParameterConstraints(compute_kernels=[compute_kernel], **more) for name in names}


def looking_up(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel_bw_lookup`, in which FUSED_TRITON is worth what FUSED is, on every device."""

    @functools.wraps(lookup)
    def kernel_bw_lookup(compute_device: str, compute_kernel: str, *args: Any, **kwargs: Any) -> Any:
        return lookup(compute_device, FUSED if compute_kernel == FUSED_TRITON else compute_kernel, *args, **kwargs)

    return kernel_bw_lookup


def filtering(choose: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`_filter_compute_kernels` or `_filter_sharding_types` of EmbeddingEnumerator, in the sharder's order.

    Up to TorchRec 1.8 they go through a set of strings, so that of two that cost the same the hash seed of the process
    chose one.
    """

    @functools.wraps(choose)
    def filter_in_order(self: Any, name: str, allowed: list[str], *args: Any, **kwargs: Any) -> list[str]:
        chosen = choose(self, name, allowed, *args, **kwargs)
        return [one for one in allowed if one in chosen]

    return filter_in_order
