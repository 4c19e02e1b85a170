"""TorchRec's FUSED_TRITON compute kernel on top of fbtriton.

    import torchrec_integration

    torchrec_integration.install()

Nothing is patched on import: that happens in `install` only, in this process only, and `uninstall` undoes it. No file
of TorchRec is written. Call it in every process that shards a model (with torchrun, at the top of the script; with
multiprocessing, in the function that the child runs), before or after `import torchrec`, and before
DistributedModelParallel.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from torchrec_integration.patching import Patches

if TYPE_CHECKING:
    from torchrec_integration.planner import (
        TritonEmbeddingBagCollectionSharder,
        TritonEmbeddingCollectionSharder,
        constraints_for,
    )

__all__ = [
    "TritonEmbeddingBagCollectionSharder",
    "TritonEmbeddingCollectionSharder",
    "constraints_for",
    "install",
    "is_installed",
    "uninstall",
]

logger = logging.getLogger("torchrec_integration")

FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
# They ask isinstance(..., FBGEMM's class), and so have to be imported before its name is bound anew.
MODULES_WITH_GATES = (
    "torchrec.distributed.batched_embedding_kernel",
    "torchrec.distributed.embedding_kernel",
    "torchrec.distributed.embedding_lookup",
    "torchrec.distributed.model_parallel",
    "torchrec.distributed.model_tracker.model_delta_tracker",
    "torchrec.distributed.utils",
    "torchrec.modules.fused_embedding_modules",
)

_installed: Patches | None = None


def install(*, fused: bool = False) -> None:
    """Make TorchRec's FUSED_TRITON compute kernel work, in this process.

    Args:
        fused: let the kernel FUSED use fbtriton too, wherever it supports what the tables ask for, and FBGEMM
            otherwise. A line of the logger "torchrec_integration" says of every TBE which it is, and why.

    Calling it again changes `fused`, for kernels that are created afterwards.

    Raises:
        RuntimeError: TorchRec cannot be imported, or is a release that this does not fit.
    """
    global _installed
    uninstall()
    kernels, parts = _parts_of_torchrec()
    from torchrec_integration import embedding_kernel, planner

    patches = Patches("torchrec")
    try:
        fbgemm = importlib.import_module(FBGEMM).SplitTableBatchedEmbeddingBagsCodegen
        gate = embedding_kernel.make_gate(fbgemm, takes_fused=fused)
        patches.replace_everywhere(fbgemm, gate)
        for lookup in (parts["GroupedPooledEmbeddingsLookup"], parts["GroupedEmbeddingsLookup"]):
            create = embedding_kernel.creating(lookup._create_embedding_kernel, kernels)
            patches.replace_attribute(lookup, "_create_embedding_kernel", create)
        pooled = parts["GroupedPooledEmbeddingsLookup"]
        choose_dtype = embedding_kernel.choosing_output_dtype(pooled._vbe_output_dtype)
        patches.replace_attribute(pooled, "_vbe_output_dtype", choose_dtype)
        for name, wrap in (
            ("compute_kernel_to_embedding_location", lambda it: embedding_kernel.locating(it, kernels)),
            ("_assert_local_cols_divisible_by_4", embedding_kernel.asserting),
            ("kernel_bw_lookup", planner.looking_up),
        ):
            patches.replace_everywhere(parts[name], wrap(parts[name]))
        enumerator = parts["EmbeddingEnumerator"]
        for name in ("_filter_compute_kernels", "_filter_sharding_types"):
            patches.replace_attribute(enumerator, name, planner.filtering(getattr(enumerator, name)))
        _accept_in_syncs(gate, patches)
    except BaseException:
        patches.undo()
        raise
    _installed = patches


def uninstall() -> None:
    """Undo `install`; does nothing if it was not called. Models that were sharded in between are not to be used any
    further: TorchRec no longer knows the class that is in them."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def is_installed() -> bool:
    """Whether FUSED_TRITON is fbtriton's, in this process."""
    return _installed is not None


def _accept_in_syncs(gate: Any, patches: Patches) -> None:
    """TorchRec 1.6 has the classes that DMPCollection keeps in step in a tuple, made when it is imported."""
    model_parallel = importlib.import_module("torchrec.distributed.model_parallel")
    if hasattr(model_parallel, "_SHARDED_TBE_TYPES"):
        types = (*model_parallel._SHARDED_TBE_TYPES, gate)
        patches.replace_attribute(model_parallel, "_SHARDED_TBE_TYPES", types)


def _parts_of_torchrec() -> tuple[Any, dict[str, Any]]:
    """EmbeddingComputeKernel and, by name, what is replaced. RuntimeError if something is not there."""
    try:
        from importlib.metadata import version

        release = version("torchrec")
        for name in MODULES_WITH_GATES:
            importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(
            f"torchrec_integration.install needs TorchRec 1.6 or later, which cannot be imported here: {error}"
        ) from error
    places = {
        "GroupedPooledEmbeddingsLookup": "torchrec.distributed.embedding_lookup",
        "GroupedEmbeddingsLookup": "torchrec.distributed.embedding_lookup",
        "compute_kernel_to_embedding_location": "torchrec.distributed.embedding_types",
        "_assert_local_cols_divisible_by_4": "torchrec.distributed.batched_embedding_kernel",
        "kernel_bw_lookup": "torchrec.distributed.planner.constants",
        "EmbeddingEnumerator": "torchrec.distributed.planner.enumerators",
    }
    parts, missing = {}, []
    for name, place in places.items():
        parts[name] = getattr(importlib.import_module(place), name, None)
        if parts[name] is None:
            missing.append(f"{place}.{name}")
    kernels = importlib.import_module("torchrec.distributed.embedding_types").EmbeddingComputeKernel
    for lookup in ("GroupedPooledEmbeddingsLookup", "GroupedEmbeddingsLookup"):
        if not hasattr(parts[lookup], "_create_embedding_kernel"):
            missing.append(f"{lookup}._create_embedding_kernel")
    if not hasattr(parts["GroupedPooledEmbeddingsLookup"], "_vbe_output_dtype"):
        missing.append("GroupedPooledEmbeddingsLookup._vbe_output_dtype")
    if not hasattr(kernels, "FUSED_TRITON"):
        missing.append("EmbeddingComputeKernel.FUSED_TRITON")
    if missing:
        raise RuntimeError(
            f"torchrec_integration.install works with TorchRec 1.6 to 1.9; in TorchRec {release} these are missing:"
            f" {', '.join(missing)}"
        )
    return kernels, parts


def __getattr__(name: str) -> Any:
    """The sharders and constraints_for, whose module imports TorchRec."""
    if name in __all__:
        return getattr(importlib.import_module("torchrec_integration.planner"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
