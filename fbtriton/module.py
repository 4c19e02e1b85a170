"""The module: owns weights and optimizer state, and calls the function underneath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fbtriton import reference
from fbtriton.bounds_check import MODES, REPORT_SIZE, BoundsReport, read_report
from fbtriton.forward.routing import upload_routes
from fbtriton.functional import table_batched_embedding_bags
from fbtriton.layout import Table
from fbtriton.optim import KINDS, NoOptimizer, Optimizer, check_range
from fbtriton.spec import OperatorSpec

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


def _check_frozen_tables(frozen_tables: Sequence[int], tables: Sequence[Table]) -> tuple[int, ...]:
    for table in frozen_tables:
        if not isinstance(table, int) or not 0 <= table < len(tables):
            raise ValueError(f"frozen_tables must be table numbers in [0, {len(tables)}), got {table!r}")
    return tuple(sorted(set(frozen_tables)))


class TableBatchedEmbeddingBags(nn.Module):
    """Many embedding tables in one operator, trained in place by a fused optimizer.

    Formula, argument shapes and what is mutated: see `fbtriton.functional.table_batched_embedding_bags`.

    Args:
        tables: one `Table` each.
        optimizer: one of `fbtriton.optim.KINDS`; applied during the backward, once for each row of the batch, with
            the gradient summed over all its entries.
        feature_table_map: the table number of each feature; default one feature for each table, in order. Features
            may share a table; every table needs a feature.
        pooling: "sum", "mean", or "none": a row of the output for every id, for tables of one dim.
        weights_dtype: float32, float16 or bfloat16.
        output_dtype: float32, float16 or bfloat16.
        stochastic_rounding: round updated fp16 and bf16 rows stochastically; fp32 rows are never rounded.
        bounds_check: "off" (valid input is promised; bad input still touches nothing outside the tensors), "ignore"
            (repair in silence), "warning" (repair and count, see `bounds_report`), "fatal" (stop).
        fused_bounds_check: check the ids while they are gathered, which costs next to nothing; False runs a check of
            its own before, with the same results.
        bag_size_hints: expected ids in a bag, for each feature. Advisory: they change the route, not the result.
        frozen_tables: numbers of tables that are not trained; `freeze_tables` changes them.
        deterministic: the same inputs give bitwise the same weights on every run. False lets the backward add the
            gradients of long runs in any order where a kernel can: on sm_100 and later with TLX, by TMA. No benefit
            was measured: on an H200, forced, it was faster than ordered slots in one launch but slower than the
            separate launches (bench/results/nvidia-h200/tlx-2026-11-30.md); on Blackwell it has not run.
        device: where weights and state live; default the current CUDA device if there is one, else the CPU. On "meta"
            nothing is allocated; `to_empty` then gives memory, with everything as at construction.

    Weights start at zero. `learning_rate` and, by `set_hyperparameter`, other numbers of the optimizer may be set
    between steps. An optimizer that counts iterations has the count in `iter`: the forwards so far with gradients on.
    Dtypes are fixed: `half()`, `to(dtype)` and the like raise ValueError if they would change one.

    Raises:
        ValueError: an argument is out of range, with its name.
    """

    weights: Tensor
    hyperparameters: Tensor
    seed_and_step: Tensor
    iter: Tensor | None
    anchor: nn.Parameter | None
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
        frozen_tables: Sequence[int] = (),
        deterministic: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tables = list(tables)
        if not tables or not all(isinstance(table, Table) for table in tables):
            raise ValueError(f"tables must be a non-empty sequence of Table, got {tables!r}")
        if type(optimizer) not in KINDS:
            names = ", ".join(kind.__name__ for kind in KINDS)
            raise ValueError(f"optimizer must be one of {names}, got {optimizer!r}")
        gives_gradients = isinstance(optimizer, NoOptimizer)
        if gives_gradients and len({table.dim for table in tables}) > 1:
            dims = [table.dim for table in tables]
            raise ValueError(f"tables must have one dim with NoOptimizer, got {dims}")
        feature_tables = _check_feature_table_map(feature_table_map, tables)
        _check_choice("pooling", pooling, ("sum", "mean", "none"))
        if pooling == "none" and len({table.dim for table in tables}) > 1:
            raise ValueError(f"tables must have one dim with pooling 'none', got {[table.dim for table in tables]}")
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
            optimizer=optimizer.variant,
            stochastic_rounding=bool(stochastic_rounding) and not gives_gradients,
            bounds_check=bounds_check,
            fused_bounds_check=bool(fused_bounds_check),
            bag_size_hints=tuple(map(float, bag_size_hints or ())),
            frozen_tables=_check_frozen_tables(frozen_tables, tables),
            max_gradient=float(optimizer.max_gradient),
            deterministic=bool(deterministic),
        )
        self._make_buffers(optimizer, torch.device(device))

    def _make_buffers(self, optimizer: Optimizer, device: torch.device) -> None:
        layout = self.spec.layout
        weights = torch.zeros(layout.weight_offsets[-1], dtype=self.spec.torch_weights_dtype, device=device)
        if isinstance(optimizer, NoOptimizer):
            self.weights = nn.Parameter(weights.view(-1, self.tables[0].dim))
        else:
            self.register_buffer("weights", weights)
        details = zip(optimizer.states, optimizer.initial_states, optimizer.state_dtypes, strict=True)
        for state, initial, dtype in details:
            size = layout.state_bases[-1] if state.rowwise else layout.weight_offsets[-1]
            self.register_buffer(state.name, torch.full((size,), initial, dtype=dtype, device=device))
        self.register_buffer(
            "hyperparameters", torch.tensor(optimizer.hyperparameters, dtype=torch.float32, device=device)
        )
        count = torch.zeros(1, dtype=torch.int64, device=device) if optimizer.counts_iterations else None
        self.register_buffer("iter", count)
        self.register_buffer("seed_and_step", torch.tensor([torch.initial_seed() % 2**63, 0], device=device))
        self.register_buffer(
            "bounds_check_report", torch.zeros(REPORT_SIZE, dtype=torch.int64, device=device), persistent=False
        )
        # Autograd needs something to differentiate; it stays empty and never gets a gradient. The weights do, if no
        # optimizer changes them.
        gives_gradients = isinstance(optimizer, NoOptimizer)
        self.register_parameter("anchor", None if gives_gradients else nn.Parameter(torch.empty(0, device=device)))
        self._upload()

    def _upload(self) -> None:
        """Copy what kernels read of the specification to the device, so that no copy falls into a capture."""
        if self.weights.is_cuda and not isinstance(self.weights, FakeTensor):  # caches outlive a fake mode
            self.spec.layout.on_device(self.weights.device)
            upload_routes(self.spec, self.weights.device)

    def _restart(self) -> None:
        """Everything as at construction, in memory that holds anything."""
        with torch.no_grad():
            self.weights.zero_()
            for state, initial in zip(self._states, self.optimizer.initial_states, strict=True):
                state.fill_(initial)
            self.hyperparameters.copy_(torch.tensor(self.optimizer.hyperparameters, dtype=torch.float32))
            self.seed_and_step.copy_(torch.tensor([torch.initial_seed() % 2**63, 0]))
            self.bounds_check_report.zero_()
            if self.iter is not None:
                self.iter.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> TableBatchedEmbeddingBags:
        for dtype in (self.weights.dtype, torch.float32):
            converted = fn(torch.empty(0, dtype=dtype, device=self.weights.device)).dtype
            if converted != dtype:
                raise ValueError(
                    f"dtype must stay {dtype}, got {converted}: dtypes are fixed at construction, by weights_dtype and"
                    " output_dtype; state is fp32"
                )
        was_meta = self.weights.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.weights.is_meta:
            self._restart()
        self._upload()
        return self

    @property
    def _flat_weights(self) -> Tensor:
        return self.weights if self.anchor is not None else self.weights.detach().view(-1)

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
        total_unique_indices: int | None = None,
    ) -> Tensor:
        """Pooled embeddings [B, sum of feature dims], or [N, dim] with pooling "none"; its backward updates the rows in
        place.

        Args:
            indices: [N] int32 or int64 ids, feature-major.
            offsets: [F * B + 1] int32 or int64; bag (f, b) holds indices[offsets[f * B + b]:offsets[f * B + b + 1]].
            per_sample_weights: [N], optional.
            batch_sizes: for each feature a list of batch sizes, one for each rank (VBE); the output then has one
                dimension, rank by rank, feature by feature, sample by sample.
            total_unique_indices: with `NoOptimizer`, the number of different rows in the batch; saves a wait.

        Raises:
            ValueError: see `fbtriton.functional.table_batched_embedding_bags`.
        """
        held: dict[str, Any] = self._buffers  # as attributes they cost a microsecond each
        anchor = self._parameters["anchor"]
        return table_batched_embedding_bags(
            self._flat_weights if anchor is None else held["weights"],
            indices,
            offsets,
            per_sample_weights,
            spec=self.spec,
            states=[held[state.name] for state in self.optimizer.states],
            hyperparameters=held["hyperparameters"],
            seed_and_step=held["seed_and_step"],
            anchor=self.weights if anchor is None else anchor,
            bounds_report=held["bounds_check_report"],
            iteration=held["iter"],
            batch_sizes=batch_sizes,
            total_unique_indices=total_unique_indices,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next forward (and of its backward). Reading it waits for the device.

        Raises:
            ValueError: there is no optimizer.
        """
        self._check_learns()
        return float(self.hyperparameters[0])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._check_learns()
        check_range("learning_rate", value)
        self.hyperparameters[0] = value
        self.optimizer = replace(self.optimizer, **{self.optimizer.hyperparameter_names[0]: float(value)})

    def _check_learns(self) -> None:
        if not self.optimizer.hyperparameter_names:
            raise ValueError(f"learning_rate needs an optimizer that has one, got {self.optimizer!r}")

    def set_hyperparameter(self, name: str, value: float) -> None:
        """Set a number of the optimizer, such as "eps", from the next forward on. CUDA graphs see it.

        Raises:
            ValueError: the optimizer has no such number that may change, or the value is out of its range.
        """
        names = self.optimizer.hyperparameter_names
        _check_choice("name", name, names)
        self.optimizer.check_hyperparameter(name, value)
        self.hyperparameters[names.index(name)] = value

    def init_uniform_(self, low: float, high: float) -> TableBatchedEmbeddingBags:
        """Fill every table with uniform numbers from [low, high), from torch's generator, in place."""
        with torch.no_grad():
            for view in self.split_embedding_weights():
                view.uniform_(low, high)
        return self

    def freeze_tables(self, tables: Sequence[int]) -> None:
        """From the next forward on the tables of these numbers are not trained, and all others are. The gradient of
        per-sample weights does not change. ValueError for what is not the number of a table."""
        self.spec = replace(self.spec, frozen_tables=_check_frozen_tables(tables, self.tables))
        self._upload()

    def split_embedding_weights(self) -> list[Tensor]:
        """A view [rows, dim] of each table. Writing to a view writes the table."""
        return reference.table_views(self._flat_weights, self.spec)

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """For each table, a view of each state in the order of `Optimizer.states`: [rows] of a row-wise one, else
        [rows, dim]. Writing to a view writes the state."""
        return reference.state_views(self._states, self.spec)

    def bounds_report(self) -> BoundsReport:
        """What the bounds check found since `clear_bounds_report`. Waits for the device."""
        return read_report(self.bounds_check_report)

    def clear_bounds_report(self) -> None:
        """Forget what the bounds check found."""
        self.bounds_check_report.zero_()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "anchor", None)
        if self._is_padded:
            for name in self._laid_out_like_weights:
                views = reference.table_views(destination[prefix + name], self.spec)
                destination[prefix + name] = torch.cat([view.flatten() for view in views])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict = dict(state_dict)  # the caller's is not changed
        if self.anchor is not None:
            state_dict[prefix + "anchor"] = self.anchor.detach()
        unpadded = sum(rows * dim for rows, dim in self.spec.tables)
        for name in self._laid_out_like_weights:
            given = state_dict.get(prefix + name)
            if self._is_padded and given is not None and given.numel() == unpadded:
                state_dict[prefix + name] = self._with_padding(given)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _laid_out_like_weights(self) -> list[str]:
        return ["weights", *(state.name for state in self.optimizer.states if not state.rowwise)]

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
