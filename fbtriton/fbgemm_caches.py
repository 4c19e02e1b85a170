"""Methods of FBGEMM's class about what does not exist here: caches, unified memory, streaming, optimizer modes.

Those of caches find nothing to do. Those that would change a result raise NotImplementedError.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

UVM_CACHE_STATS = 6  # numbers in FBGEMM's statistics

logger = logging.getLogger(__name__)


class WithoutCaches:
    """Base of `fbtriton.SplitTableBatchedEmbeddingBagsCodegen`."""

    cache_miss_counter: Tensor
    table_wise_cache_miss: Tensor
    uvm_cache_stats: Tensor
    logging_table_name: str

    def flush(self) -> None:
        """Write cached rows back: there are none."""

    def reset_cache_states(self) -> None:
        """Forget what is cached: nothing is."""

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Bring rows into the cache: they all lie in device memory."""

    @staticmethod
    def get_prefetch_passes(
        multipass_prefetch_config: Any, input_tensor: Tensor, output_tensor: Tensor
    ) -> list[tuple[Tensor, Tensor, int]]:
        """One pass over everything, whatever the configuration: [(input_tensor, output_tensor, 0)]."""
        return [(input_tensor, output_tensor, 0)]

    def get_cache_miss_counter(self) -> Tensor:
        """[2] int64, zeros."""
        return self.cache_miss_counter

    def get_table_wise_cache_miss(self) -> Tensor:
        """[0] int64."""
        return self.table_wise_cache_miss

    def get_uvm_cache_stats(self, use_local_cache: bool = False) -> Tensor:
        """[6] int64, zeros."""
        return self.uvm_cache_stats

    def reset_uvm_cache_stats(self) -> None:
        """They are zeros already."""

    def print_uvm_cache_stats(self, use_local_cache: bool = False) -> None:
        """Log that there is no cache."""
        self.log("no cache: all rows lie in the memory of their device")

    def raw_embedding_stream(self) -> None:
        """Send updated rows away: streaming is refused at construction, so there is nothing to send."""

    def ema_inplace(self, emainplace_mode: dict[str, float]) -> None:
        """NotImplementedError: the optimizer mode does not exist here."""
        raise NotImplementedError("ema_inplace is not supported")

    def ensemble_and_swap(self, ensemble_mode: dict[str, float]) -> None:
        """NotImplementedError: the optimizer mode does not exist here."""
        raise NotImplementedError("ensemble_and_swap is not supported")

    def writeback_hook(self, module: Any, grad: tuple[Tensor]) -> tuple[Tensor]:
        """NotImplementedError: gradients are not rewritten here."""
        raise NotImplementedError("writeback_hook is not supported")

    def should_log(self) -> bool:
        """Whether cache statistics are due: never."""
        return False

    def log(self, msg: str) -> None:
        """Log at level INFO, with the names of the tables."""
        logger.info("%s: %s", self.logging_table_name, msg)

    @staticmethod
    def get_table_name_for_logging(table_names: list[str] | None) -> str:
        """The name if there is one, else how many different names there are, and the sorted names."""
        if table_names is None:
            return "<Unknown>"
        names = sorted(set(table_names))
        return names[0] if len(names) == 1 else f"<{len(names)} tables>: {names}"


def register_empty_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """FBGEMM's buffers about what does not exist here; not in `state_dict`."""
    sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "cache_miss_counter": ((2,), torch.int64),
        "table_wise_cache_miss": ((0,), torch.int64),
        "uvm_cache_stats": ((UVM_CACHE_STATS,), torch.int64),
        "lxu_cache_weights": ((0, 0), torch.float32),
        "max_counter": ((1,), torch.float32),
    }
    for name in (
        "cache_hash_size_cumsum",
        "total_cache_hash_size",
        "cache_index_table_map",
        "lxu_cache_state",
        "lxu_state",
    ):
        sizes[name] = ((1,), torch.int64)
    sizes["lxu_cache_locking_counter"] = ((0, 0), torch.int32)
    sizes["local_uvm_cache_stats"] = ((1,), torch.int32)
    for state in ("prev_iter", "row_counter"):
        for part in ("dev", "host", "uvm", "placements", "offsets"):
            sizes[f"{state}_{part}"] = ((1,), torch.int64)
    for name, dtype in (("indices", torch.int64), ("count", torch.int32), ("copy_done", torch.int32)):
        sizes[f"res_{name}"] = ((0,) if name == "indices" else (1,), dtype)
    sizes["res_weights"] = ((0, 0), torch.float32)
    sizes["res_identities"] = sizes["res_runtime_meta"] = ((0, 1), torch.int64)
    for name, (size, dtype) in sizes.items():
        initial = torch.full(size, float(name == "max_counter"), dtype=dtype, device=device)
        module.register_buffer(name, initial, persistent=False)
