"""FBGEMM's names for what the module holds: buffers and attributes.

Example, tables of 3 rows of dim 1 and 2 rows of dim 4, fp32, features -> [0, 1, 0]:

    weights_offsets     0, 4, 0      elements; the first table is padded to 16 bytes
    hash_size_cumsum    0, 3, 0, 5   rows before the feature's table, and of all tables
    rows_per_table      3, 2, 3      by feature, in spite of the name
    D_offsets           0, 1, 5, 6   columns of the output
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fbtriton.bounds_check import BoundsReport
from fbtriton.enums import SPARSE_TYPE_NUMBERS, EmbeddingLocation
from fbtriton.fbgemm_caches import register_empty_buffers
from fbtriton.module import TableBatchedEmbeddingBags
from fbtriton.optim import NoOptimizer

PLACE_NUMBERS = {"dev": EmbeddingLocation.DEVICE, "host": EmbeddingLocation.HOST}
MOMENTA = ("momentum1", "momentum2")
INT8_EMB_ROW_DIM_OFFSET = 8  # FBGEMM's constant of INT8 rows, read by TorchRec


class Bags(TableBatchedEmbeddingBags):
    """The module inside FBGEMM's class, which saves and loads it under FBGEMM's names."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        pass


def _placed(prefix: str, place: str) -> Any:
    """A property: the flat weights or a state if the tables lie at this place, otherwise an empty tensor."""

    def get(self: FbgemmNames) -> Tensor:
        name = self._name_in_bags(prefix)
        if name is None:
            return self.rows_per_table.new_zeros(1)
        tensor: Tensor = getattr(self.bags, name)
        return tensor if place == self.place else tensor.new_empty(0)

    def replace(self: FbgemmNames, tensor: Tensor) -> None:
        name = self._name_in_bags(prefix)
        if name is None or place != self.place:
            if tensor.numel() == 0:
                return
            raise ValueError(f"{prefix}_{place} must stay empty: nothing of this module lies there")
        before: Tensor = getattr(self.bags, name)
        if tensor.shape != before.shape or tensor.dtype != before.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{prefix}_{place} must be a contiguous tensor of {before.dtype} of shape {list(before.shape)}, which"
                f" has padding between tables, got {tensor.dtype} of shape {list(tensor.shape)}"
            )
        setattr(self.bags, name, tensor)

    return property(get, replace, doc=f"The flat {prefix} if the tables lie there ({place}), otherwise empty.")


class FbgemmNames(nn.Module):
    """Base of `fbtriton.SplitTableBatchedEmbeddingBagsCodegen`; `_describe` fills in everything."""

    bags: Bags
    embedding_specs: list[tuple[int, int, Any, Any]]
    place: str  # "dev" or "host"
    feature_table_map: list[int]
    dims: tuple[int, ...]  # of the tables
    D_offsets: Tensor  # [F + 1] int32
    hash_size_cumsum: Tensor  # [F + 1] int64
    rows_per_table: Tensor  # [F] int64
    feature_dims: Tensor  # [F] int64, on the CPU
    weights_physical_offsets: list[int]  # [T]
    weights_physical_placements: list[Any]  # [T] EmbeddingLocation, as given

    weights_dev = _placed("weights", "dev")
    weights_host = _placed("weights", "host")
    weights_uvm = _placed("weights", "uvm")
    momentum1_dev = _placed("momentum1", "dev")
    momentum1_host = _placed("momentum1", "host")
    momentum1_uvm = _placed("momentum1", "uvm")
    momentum2_dev = _placed("momentum2", "dev")
    momentum2_host = _placed("momentum2", "host")
    momentum2_uvm = _placed("momentum2", "uvm")

    def _describe(self, place: str) -> None:
        """Set the buffers and attributes that say what the tables are and where they lie."""
        spec, device = self.bags.spec, self.bags.weights.device
        layout, features = spec.layout, list(spec.feature_tables)
        self.place = place
        self.feature_table_map = features
        self.dims = layout.dims
        self.max_D = max(layout.dims)
        self.total_D = layout.columns[-1]
        self.mixed_D = len(set(layout.dims)) > 1
        self.max_D_cache = 0
        self.total_hash_size = layout.no_key
        self.total_hash_size_bits = layout.no_key.bit_length()
        info_bits = 32 - len(features).bit_length()
        self.info_B_num_bits, self.info_B_mask = info_bits, (1 << info_bits) - 1
        self.int8_emb_row_dim_offset = INT8_EMB_ROW_DIM_OFFSET
        self.is_nobag = spec.pooling == "none"
        self.use_cpu = place == "host"

        def buffer(name: str, numbers: list[int], dtype: torch.dtype, where: Any = device) -> None:
            self.register_buffer(name, torch.tensor(numbers, dtype=dtype, device=where), persistent=False)

        def per_feature(numbers: Any) -> list[int]:
            return [numbers[table] for table in features]

        buffer("D_offsets", layout.columns, torch.int32)
        buffer("hash_size_cumsum", [*per_feature(layout.state_bases), layout.no_key], torch.int64)
        buffer("rows_per_table", per_feature(layout.rows), torch.int64)
        buffer("feature_dims", layout.feature_dims, torch.int64, "cpu")
        for prefix in ("weights", *MOMENTA):
            if prefix not in self.prefixes:
                buffer(f"{prefix}_placements", [0], torch.int64)
                buffer(f"{prefix}_offsets", [0], torch.int64)
                continue
            offsets = self._offsets_in_bags(prefix)
            setattr(self, f"{prefix}_physical_offsets", offsets)
            setattr(self, f"{prefix}_physical_placements", [location for _, _, location, _ in self.embedding_specs])
            buffer(f"{prefix}_offsets", per_feature(offsets), torch.int64)
            buffer(f"{prefix}_placements", [PLACE_NUMBERS[place].value] * len(features), torch.int32)
        register_empty_buffers(self, device)

    def _apply(self, fn: Any, recurse: bool = True) -> FbgemmNames:
        was_meta = self.bags.weights.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.bags.weights.is_meta:
            self._describe(self.place)
        return self

    @property
    def prefixes(self) -> list[str]:
        """FBGEMM's names of the weights and of each state that there is."""
        return ["weights", *MOMENTA[: len(self.bags.optimizer.states)]]

    def _needs_optimizer(self, method: str) -> None:
        if isinstance(self.bags.optimizer, NoOptimizer):
            raise NotImplementedError(f"{method} is not supported with optimizer NONE")

    def _name_in_bags(self, prefix: str) -> str | None:
        """Our name of "weights" or of a momentum; None if the optimizer has no such state."""
        if prefix not in self.prefixes:
            return None
        return prefix if prefix == "weights" else self.bags.optimizer.states[MOMENTA.index(prefix)].name

    def _offsets_in_bags(self, prefix: str) -> list[int]:
        """[T] the first element of each table in our tensor."""
        layout = self.bags.spec.layout
        rowwise = prefix != "weights" and self.bags.optimizer.states[MOMENTA.index(prefix)].rowwise
        return (layout.state_bases if rowwise else layout.weight_offsets)[:-1]

    def views_of(self, prefix: str) -> list[Tensor]:
        """Views of each table's weights or state."""
        if prefix == "weights":
            return self.bags.split_embedding_weights()
        return [states[MOMENTA.index(prefix)] for states in self.bags.split_optimizer_states()]

    def split_embedding_weights(self) -> list[Tensor]:
        """A view [rows, dim] of each table. Writing to a view writes the table."""
        return self.bags.split_embedding_weights()

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """For each table its states, views [rows] or [rows, dim]; an empty list if the optimizer has none.
        NotImplementedError with optimizer NONE."""
        self._needs_optimizer("split_optimizer_states")
        return self.bags.split_optimizer_states() if self.bags.optimizer.states else []

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """For each table its states by name, the same views; an empty list if the optimizer has none.
        NotImplementedError with optimizer NONE."""
        names = [state.name for state in self.bags.optimizer.states]
        return [dict(zip(names, states, strict=True)) for states in self.split_optimizer_states()]

    def get_optimizer_buffer(self, state: str) -> Tensor:
        """The buffer of that name, such as "momentum1_dev"; ValueError if there is none, NotImplementedError with
        optimizer NONE."""
        self._needs_optimizer("get_optimizer_buffer")
        buffer = getattr(self, state, None)
        if not isinstance(buffer, Tensor):
            raise ValueError(f"state must be the name of a buffer, got {state!r}")
        return buffer

    def get_states(self, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of "weights", "momentum1" or "momentum2": its tensors in device, host and unified memory, and for each table
        where it lies, [T] int32, and its first element, [T] int64. ValueError if there is no such state."""
        if prefix not in self.prefixes:
            raise ValueError(f"prefix must be one of {', '.join(self.prefixes)}, got {prefix!r}")
        return (
            getattr(self, f"{prefix}_dev"),
            getattr(self, f"{prefix}_host"),
            getattr(self, f"{prefix}_uvm"),
            torch.tensor([place.value for place in getattr(self, f"{prefix}_physical_placements")], dtype=torch.int32),
            torch.tensor(getattr(self, f"{prefix}_physical_offsets"), dtype=torch.int64),
        )

    def get_all_states(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """`get_states` of the weights and of each state that the optimizer has."""
        return [self.get_states(prefix) for prefix in self.prefixes]

    @property
    def iter(self) -> Tensor:
        """[1] int64 on the device, set by `set_optimizer_step`: forwards with gradients on, which Adam and LAMB count;
        with other optimizers a view of the step of stochastic rounding, the backwards that have updated rows."""
        count = self.bags.iter
        return self.bags.seed_and_step[1:] if count is None else count

    @property
    def bounds_check_warning(self) -> Tensor:
        """[1] int64 on the device: bad ids and offsets since `clear_bounds_report`."""
        return self.bags.bounds_check_report[:2].sum(dim=0, keepdim=True)

    def bounds_report(self) -> BoundsReport:
        """What the bounds check found since `clear_bounds_report`. Waits for the device."""
        return self.bags.bounds_report()

    def clear_bounds_report(self) -> None:
        """Forget what the bounds check found."""
        self.bags.clear_bounds_report()

    def freeze_tables(self, tables: Sequence[int]) -> None:
        """From the next forward on the tables of these numbers are not trained, and all others are. The gradient of
        per-sample weights does not change. ValueError for what is not the number of a table."""
        self.bags.freeze_tables(tables)

    @property
    def placeholder_autograd_tensor(self) -> Tensor:
        """The empty parameter that autograd differentiates; with optimizer NONE, where that is the weights, any empty
        tensor."""
        anchor = self.bags.anchor
        return torch.empty(0, device=self.current_device) if anchor is None else anchor

    @property
    def current_device(self) -> torch.device:
        """Where the tables lie."""
        return self.bags.weights.device

    @property
    def output_dtype(self) -> int:
        """FBGEMM's number of the output's dtype."""
        return SPARSE_TYPE_NUMBERS[self.bags.spec.torch_output_dtype]
