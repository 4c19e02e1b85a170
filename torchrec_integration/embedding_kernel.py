"""Which class computes a TBE of TorchRec, and the way there.

TorchRec's FUSED kernel (`BatchedFusedEmbeddingBag`, `BatchedFusedEmbedding`) speaks to FBGEMM's
`SplitTableBatchedEmbeddingBagsCodegen` only by its methods, and fbtriton's class has them all. So FUSED_TRITON becomes
TorchRec's own FUSED kernel with fbtriton's class inside: pooling, checkpoints, index types, learning rates, batch sizes
for each feature and every kind of sharding are TorchRec's code, of the release that is installed.

    a lookup creates the kernel of a group of tables    `creating`: FUSED_TRITON goes to TorchRec's branch for FUSED
    that constructs FBGEMM's class, by name             `Gate`: the name is bound to it; it picks the class
    TorchRec asks isinstance(..., FBGEMM's class)       `Gate` again: true for both
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from fbtriton import SplitTableBatchedEmbeddingBagsCodegen as FbtritonTbe
from fbtriton.layout import ROW_ALIGNMENT_BYTES
from torchrec_integration import options

logger = logging.getLogger("torchrec_integration")

FUSED, FUSED_TRITON = "fused", "fused_triton"


@dataclasses.dataclass(frozen=True)
class Request:
    """The kernel that a lookup is creating."""

    kernel: str  # a value of EmbeddingComputeKernel
    features: tuple[str, ...]  # of the group of tables, in order
    fully_sharded: bool = False  # the kernel takes the weights' memory away between forward and backward


_request: ContextVar[Request | None] = ContextVar("torchrec_integration_request", default=None)


def is_requested() -> bool:
    """Whether a FUSED_TRITON kernel is being created."""
    request = _request.get()
    return request is not None and request.kernel == FUSED_TRITON


@contextlib.contextmanager
def requesting(kernel: str, features: list[str], fully_sharded: bool) -> Iterator[None]:
    token = _request.set(Request(kernel, tuple(features), fully_sharded))
    try:
        yield
    finally:
        _request.reset(token)


class _GateType(type):
    """Calls and isinstance of a gate."""

    fbgemm: type
    takes_fused: bool

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _make(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.fbgemm, FbtritonTbe))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.fbgemm, FbtritonTbe))


def make_gate(fbgemm: type, takes_fused: bool) -> _GateType:
    """What TorchRec's modules get in place of `fbgemm`, FBGEMM's class.

    Args:
        takes_fused: give FUSED kernels fbtriton's class too, where it supports what they ask for.
    """
    return _GateType(fbgemm.__name__, (), {"fbgemm": fbgemm, "takes_fused": takes_fused, "__doc__": fbgemm.__doc__})


def _make(gate: _GateType, *args: Any, **kwargs: Any) -> Any:
    request = _request.get()
    kernel = request.kernel if request is not None else FUSED
    tables = ", ".join(kwargs.get("table_names") or ("(unnamed)",))
    if kernel == FUSED_TRITON:
        tbe = _make_fbtriton(*args, **kwargs)
        logger.info("%s kernel of tables %s: fbtriton", kernel, tables)
        return tbe
    reason = "FUSED is FBGEMM's unless install(fused=True)"
    if gate.takes_fused and request is not None and request.fully_sharded:
        reason = "ShardingStrategy.FULLY_SHARDED takes the weights' memory away between forward and backward"
    elif gate.takes_fused:
        try:
            tbe = _make_fbtriton(*args, **kwargs)
        except (NotImplementedError, ValueError, TypeError) as error:  # TypeError: an argument that we do not know
            reason = str(error)
        else:
            logger.info("%s kernel of tables %s: fbtriton, as install(fused=True) asks", kernel, tables)
            return tbe
    logger.info("%s kernel of tables %s: FBGEMM: %s", kernel, tables, reason)
    return gate.fbgemm(*args, **options.for_fbgemm(kwargs))


def _make_fbtriton(*args: Any, **kwargs: Any) -> FbtritonTbe:
    request = _request.get()
    tbe = FbtritonTbe(*args, **options.for_fbtriton(kwargs, request.features if request is not None else ()))
    _check_neighbours(tbe)
    return tbe


def _check_neighbours(tbe: FbtritonTbe) -> None:
    """TorchRec takes the column shards of a table that are in one TBE for one piece of memory.

    Raises:
        ValueError: there is padding between them.
    """
    counts = Counter(tbe.table_names or ())
    itemsize = tbe.bags.spec.torch_weights_dtype.itemsize
    for name, (rows, dim, _, _) in zip(tbe.table_names or (), tbe.embedding_specs, strict=False):
        if counts[name] > 1 and rows * dim * itemsize % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"table {name}: each of its {counts[name]} column shards on this rank must have a multiple of"
                f" {ROW_ALIGNMENT_BYTES} bytes, got {rows} rows of {dim} columns of {itemsize} bytes; choose wider"
                " shards or another number of rows"
            )


def creating(create: Callable[..., Any], kernels: Any) -> Callable[..., Any]:
    """`_create_embedding_kernel` of one of TorchRec's lookups, with FUSED_TRITON as FUSED with fbtriton's class inside.

    Args:
        create: TorchRec's method; its argument `config` is a GroupedEmbeddingConfig.
        kernels: TorchRec's EmbeddingComputeKernel.
    """
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_embedding_kernel(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        config = bound.arguments["config"]
        fully_sharded = _is_fully_sharded(bound.arguments.get("env"))
        with requesting(config.compute_kernel.value, config.feature_names(), fully_sharded):
            if config.compute_kernel != kernels.FUSED_TRITON:
                return create(*args, **kwargs)
            if fully_sharded:
                raise NotImplementedError(
                    "FUSED_TRITON with ShardingStrategy.FULLY_SHARDED is not supported: use the default strategy of"
                    " DMPCollection, or the kernel FUSED"
                )
            bound.arguments["config"] = dataclasses.replace(config, compute_kernel=kernels.FUSED)
            kernel = create(*bound.args, **bound.kwargs)
        kernel._config = config  # so that what reads it sees FUSED_TRITON
        return kernel

    return create_embedding_kernel


def _is_fully_sharded(env: Any) -> bool:
    strategy = getattr(env, "sharding_strategy", None)
    return getattr(strategy, "name", None) == "FULLY_SHARDED"


def choosing_output_dtype(choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_vbe_output_dtype` of TorchRec's lookup of bags, which takes fp16 for bf16."""

    @functools.wraps(choose)
    def vbe_output_dtype(self: Any) -> Any:
        dtype = choose(self)
        wanted = (self.grouped_configs[0].fused_params or {}).get("output_dtype")
        return torch.bfloat16 if getattr(wanted, "name", None) == "BF16" else dtype

    return vbe_output_dtype


def locating(locate: Callable[[Any], Any], kernels: Any) -> Callable[[Any], Any]:
    """`compute_kernel_to_embedding_location`, which knows that FUSED_TRITON lies where FUSED does."""

    @functools.wraps(locate)
    def compute_kernel_to_embedding_location(compute_kernel: Any) -> Any:
        return locate(kernels.FUSED if compute_kernel == kernels.FUSED_TRITON else compute_kernel)

    return compute_kernel_to_embedding_location


def asserting(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """TorchRec's check that column shards have a multiple of 4 columns, which only FBGEMM needs."""

    @functools.wraps(check)
    def assert_local_cols(config: Any) -> None:
        if not is_requested():
            check(config)

    return assert_local_cols
