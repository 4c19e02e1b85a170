"""Everything about the operator that is fixed at construction."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from fbtriton.layout import TableLayout

_layout = functools.cache(TableLayout)


@dataclass(frozen=True, eq=False)
class OperatorSpec:
    """Everything about the operator that is fixed at construction, in a form that hashes and prints as JSON.

    Ops take it as a string: it costs the dispatcher nothing, survives pickling, `torch.compile` and export,
    and names the operator completely.

    Args:
        tables: (rows, dim) of each table.
        feature_tables: the table of each feature.
        pooling: "sum", "mean" or "none".
        weights_dtype, output_dtype: "float32", "float16" or "bfloat16".
        optimizer: a name in `fbtriton.optim.OPTIMIZERS`, see `Optimizer.variant`.
        stochastic_rounding: round updated fp16 and bf16 rows stochastically.
        bounds_check: "off", "ignore", "warning" or "fatal".
        fused_bounds_check: the forward checks the ids that it loads; otherwise a check of its own runs before.
        bag_size_hints: expected ids in a bag, for each feature; empty = not given. Changes routes only.
        frozen_tables: tables that are not trained.
        max_gradient: see `fbtriton.optim.Optimizer`.
        deterministic: the same inputs give bitwise the same weights on every run; False allows sums in any order.

    Attributes:
        text: the specification as JSON; `from_json` is its inverse.
    """

    tables: tuple[tuple[int, int], ...]
    feature_tables: tuple[int, ...]
    pooling: str
    weights_dtype: str
    output_dtype: str
    optimizer: str
    stochastic_rounding: bool
    bounds_check: str
    fused_bounds_check: bool = True
    bag_size_hints: tuple[float, ...] = ()
    frozen_tables: tuple[int, ...] = ()
    max_gradient: float = 0.0
    deterministic: bool = True

    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = {name: value for name, value in vars(self).items() if name != "text"}
        object.__setattr__(self, "text", json.dumps(fields, separators=(",", ":")))

    @staticmethod
    @functools.cache
    def from_json(text: str) -> OperatorSpec:
        fields = json.loads(text)
        fields["tables"] = tuple((rows, dim) for rows, dim in fields["tables"])
        fields["feature_tables"] = tuple(fields["feature_tables"])
        fields["bag_size_hints"] = tuple(fields["bag_size_hints"])
        fields["frozen_tables"] = tuple(fields["frozen_tables"])
        return OperatorSpec(**fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorSpec) and self.text == other.text

    def __hash__(self) -> int:  # a string remembers its own
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return OperatorSpec.from_json, (self.text,)

    @functools.cached_property
    def layout(self) -> TableLayout:
        """One and the same object for equal layouts: what is on a device is kept with it."""
        rows, dims = zip(*self.tables, strict=True)
        itemsize = self.torch_weights_dtype.itemsize
        padded = self.optimizer != "none"
        return _layout(rows, dims, self.feature_tables, itemsize, self.frozen_tables, padded)

    @property
    def torch_weights_dtype(self) -> torch.dtype:
        return getattr(torch, self.weights_dtype)

    @property
    def torch_output_dtype(self) -> torch.dtype:
        return getattr(torch, self.output_dtype)

    @functools.cached_property
    def trained_features(self) -> frozenset[int]:
        """The features whose tables are not frozen."""
        return frozenset(f for f, table in enumerate(self.feature_tables) if table not in self.frozen_tables)

    @property
    def mean(self) -> bool:
        return self.pooling == "mean"

    @property
    def pooled(self) -> bool:
        """Whether the rows of a bag become one; otherwise every entry has a row of the output."""
        return self.pooling != "none"
