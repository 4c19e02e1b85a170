"""The module: owns weights and optimizer state, and calls the function underneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fbtriton import reference
from fbtriton.bounds_check import MODES, REPORT_SIZE, BoundsReport, read_report
from fbtriton.forward.routing import upload_routes
from fbtriton.functional import table_batched_embedding_bags
from fbtriton.layout import OperatorSpec, Table
from fbtriton.optim import OPTIMIZERS, Optimizer

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _check_feature_table_map(feature_table_map: Sequence[int] | None, tables: Sequence[Table]) -> tuple[int, ...]:
    if feature_table_map is None:
        return tuple(range(len(tables)))
    for feature, table in enumerate(feature_table_map):
        if not isinstance(table, int) or not 0 <= table < len(tables):
            raise ValueError(
                f"feature_table_map[{feature}] must be a table number in [0, {len(tables)}), got {table!r}"
            )
    for table in range(len(tables)):
        if table not in feature_table_map:
            raise ValueError(
                f"feature_table_map must use every table, got {list(feature_table_map)} without table {table}"
            )
    return tuple(feature_table_map)


def _check_hints(bag_size_hints: Sequence[float], num_features: int) -> None:
    if len(bag_size_hints) != num_features:
        raise ValueError(
            f"bag_size_hints must have one entry for each of {num_features} features, got {len(bag_size_hints)}"
        )
    for feature, hint in enumerate(bag_size_hints):
        if not isinstance(hint, (int, float)) or not 0 <= hint < float("inf"):
            raise ValueError(f"bag_size_hints[{feature}] must be a finite number >= 0, got {hint!r}")


class TableBatchedEmbeddingBags(nn.Module):
    """Many embedding tables in one operator, trained in place by a fused optimizer.

    Formula, argument shapes and what is mutated: see `fbtriton.functional.table_batched_embedding_bags`.

    Args:
        tables: one `Table` each.
        optimizer: `SGD` or `RowwiseAdagrad`; applied during the backward, once for each row of the batch, with
            the gradient summed over all its entries.
        feature_table_map: the table number of each feature; default one feature for each table, in order. Features
            may share a table; every table needs a feature.
        pooling: "sum" or "mean".
        weights_dtype: float32, float16 or bfloat16.
        output_dtype: float32, float16 or bfloat16.
        stochastic_rounding: round updated fp16 and bf16 rows stochastically; fp32 rows are never rounded.
        bounds_check: "off" (valid input is promised; bad input still touches nothing outside the tensors), "ignore"
            (repair in silence), "warning" (repair and count, see `bounds_report`), "fatal" (stop).
        fused_bounds_check: check the ids while they are gathered, which costs next to nothing; False runs a check of
            its own before, with the same results.
        bag_size_hints: expected ids in a bag, for each feature. Advisory: they change the route, not the result.
        deterministic: the same inputs give bitwise the same weights on every run. False lets the backward add the
            gradients of long runs in any order where a kernel can: on sm_100 and later with TLX, by TMA. What that
            gains has not been measured.
        device: where weights and state live; default the current CUDA device if there is one, else the CPU.

    Weights start at zero. `learning_rate` may be set between steps.

    Raises:
        ValueError: an argument is out of range, with its name.
    """

    weights: Tensor
    hyperparameters: Tensor
    seed_and_step: Tensor
    bounds_check_report: Tensor

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: Optimizer,
        feature_table_map: Sequence[int] | None = None,
        pooling: str = "sum",
        weights_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = True,
        bounds_check: str = "warning",
        fused_bounds_check: bool = True,
        bag_size_hints: Sequence[float] | None = None,
        deterministic: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tables = list(tables)
        if not tables or not all(isinstance(table, Table) for table in tables):
            raise ValueError(f"tables must be a non-empty sequence of Table, got {tables!r}")
        if type(optimizer) not in OPTIMIZERS.values():
            names = ", ".join(kind.__name__ for kind in OPTIMIZERS.values())
            raise ValueError(f"optimizer must be one of {names}, got {optimizer!r}")
        feature_tables = _check_feature_table_map(feature_table_map, tables)
        _check_choice("pooling", pooling, ("sum", "mean"))
        _check_choice("weights_dtype", weights_dtype, list(DTYPES))
        _check_choice("output_dtype", output_dtype, list(DTYPES))
        _check_choice("bounds_check", bounds_check, MODES)
        if bag_size_hints is not None:
            _check_hints(bag_size_hints, len(feature_tables))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.tables = tables
        self.optimizer = optimizer
        self.spec = OperatorSpec(
            tables=tuple((table.rows, table.dim) for table in tables),
            feature_tables=feature_tables,
            pooling=pooling,
            weights_dtype=DTYPES[weights_dtype],
            output_dtype=DTYPES[output_dtype],
            optimizer=optimizer.name,
            stochastic_rounding=bool(stochastic_rounding),
            bounds_check=bounds_check,
            fused_bounds_check=bool(fused_bounds_check),
            bag_size_hints=tuple(map(float, bag_size_hints or ())),
            deterministic=bool(deterministic),
        )
        self._make_buffers(optimizer, torch.device(device))

    def _make_buffers(self, optimizer: Optimizer, device: torch.device) -> None:
        layout = self.spec.layout
        self.register_buffer(
            "weights", torch.zeros(layout.weight_offsets[-1], dtype=self.spec.torch_weights_dtype, device=device)
        )
        for state, initial in zip(optimizer.states, optimizer.initial_states, strict=True):
            self.register_buffer(
                state.name, torch.full((layout.state_bases[-1],), initial, dtype=torch.float32, device=device)
            )
        self.register_buffer(
            "hyperparameters", torch.tensor(optimizer.hyperparameters, dtype=torch.float32, device=device)
        )
        self.register_buffer("seed_and_step", torch.tensor([torch.initial_seed() % 2**63, 0], device=device))
        self.register_buffer(
            "bounds_check_report", torch.zeros(REPORT_SIZE, dtype=torch.int64, device=device), persistent=False
        )
        # Autograd needs something to differentiate; it stays empty and never gets a gradient.
        self.anchor = nn.Parameter(torch.empty(0, device=device))
        if device.type == "cuda":
            layout.on_device(self.weights.device)
            upload_routes(self.spec, self.weights.device)

    @property
    def _states(self) -> list[Tensor]:
        return [getattr(self, state.name) for state in self.optimizer.states]

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pooled embeddings [B, sum of feature dims]; its backward updates the rows in place.

        Args:
            indices: [N] int32 or int64 ids, feature-major.
            offsets: [F * B + 1] int32 or int64; bag (f, b) holds indices[offsets[f * B + b]:offsets[f * B + b + 1]].
            per_sample_weights: [N], optional.
            batch_sizes: for each feature a list of batch sizes, one for each rank (VBE); the output then has one
                dimension, rank by rank, feature by feature, sample by sample.

        Raises:
            ValueError: see `fbtriton.functional.table_batched_embedding_bags`.
        """
        return table_batched_embedding_bags(
            self.weights,
            indices,
            offsets,
            per_sample_weights,
            spec=self.spec,
            states=self._states,
            hyperparameters=self.hyperparameters,
            seed_and_step=self.seed_and_step,
            anchor=self.anchor,
            bounds_report=self.bounds_check_report,
            batch_sizes=batch_sizes,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next forward (and of its backward). Reading it waits for the device."""
        return float(self.hyperparameters[0])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise ValueError(f"learning_rate must be a finite number >= 0, got {value!r}")
        self.hyperparameters[0] = value

    def init_uniform_(self, low: float, high: float) -> TableBatchedEmbeddingBags:
        """Fill every table with uniform numbers from [low, high), from torch's generator, in place."""
        with torch.no_grad():
            for view in self.split_embedding_weights():
                view.uniform_(low, high)
        return self

    def split_embedding_weights(self) -> list[Tensor]:
        """A view [rows, dim] of each table. Writing to a view writes the table."""
        return reference.table_views(self.weights, self.spec)

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """For each table, a view [rows] of each row-wise state: [] for SGD, [sum] for row-wise Adagrad."""
        return reference.state_views(self._states, self.spec)

    def bounds_report(self) -> BoundsReport:
        """What the bounds check found since `clear_bounds_report`. Waits for the device."""
        return read_report(self.bounds_check_report)

    def clear_bounds_report(self) -> None:
        """Forget what the bounds check found."""
        self.bounds_check_report.zero_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "anchor"]
        if self._is_padded:
            views = self.split_embedding_weights()
            destination[prefix + "weights"] = torch.cat([view.flatten() for view in views])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict = dict(state_dict)  # the caller's is not changed
        state_dict[prefix + "anchor"] = self.anchor.detach()
        weights = state_dict.get(prefix + "weights")
        unpadded = sum(rows * dim for rows, dim in self.spec.tables)
        if self._is_padded and weights is not None and weights.numel() == unpadded:
            state_dict[prefix + "weights"] = self._with_padding(weights)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _is_padded(self) -> bool:
        return self.weights.numel() != sum(rows * dim for rows, dim in self.spec.tables)

    def _with_padding(self, unpadded: Tensor) -> Tensor:
        padded = torch.zeros_like(self.weights, device=unpadded.device, dtype=unpadded.dtype)
        views = reference.table_views(padded, self.spec)
        for view, part in zip(views, unpadded.split([view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))
        return padded

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{table.rows}x{table.dim}" for table in self.tables)
        return f"tables=[{shapes}], optimizer={self.optimizer}, pooling={self.spec.pooling!r}"
