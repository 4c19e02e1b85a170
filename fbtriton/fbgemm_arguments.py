"""What FBGEMM's constructor arguments mean here: the optimizer they name, and what is refused.

`docs/migration.md` has the same, argument by argument.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fbtriton.enums import (
    FLOAT_DTYPES,
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SparseType,
    WeightDecayMode,
    member_of,
)
from fbtriton.layout import Table
from fbtriton.optim import SGD, Optimizer, RowwiseAdagrad

BOUNDS_CHECKS = {"FATAL": "fatal", "WARNING": "warning", "IGNORE": "ignore", "NONE": "off"}
MANAGED = (EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING)


class OptimizerArgs(NamedTuple):
    """The optimizer's arguments under FBGEMM's names, as they are now."""

    stochastic_rounding: bool
    gradient_clipping: bool
    max_gradient: float
    max_norm: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    weight_decay_mode: int
    eta: float
    momentum: float


def make_optimizer(kind: EmbOptimType, learning_rate: float, args: OptimizerArgs, initial: float) -> Optimizer:
    """The optimizer that FBGEMM's arguments describe.

    Args:
        kind: FBGEMM's optimizer.
        initial: value of row-wise Adagrad's accumulator at the start.

    Raises:
        NotImplementedError: the optimizer, or what is asked of it, does not exist here.
        ValueError: a number is out of range, or means nothing for this optimizer.
    """
    if not 0 <= learning_rate < math.inf:
        raise ValueError(f"learning_rate must be a finite number >= 0, got {learning_rate!r}")
    if args.gradient_clipping:
        raise NotImplementedError("gradient_clipping=True is not supported")
    if args.max_norm != 0:
        raise NotImplementedError(f"max_norm={args.max_norm} is not supported, expected 0")
    if initial != 0 and kind is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        raise ValueError(f"initial_accumulator_value must be 0 with optimizer {kind.name}, got {initial}")
    if kind is EmbOptimType.EXACT_SGD:
        return SGD(learning_rate)
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        if args.weight_decay_mode != WeightDecayMode.NONE:
            mode = WeightDecayMode(args.weight_decay_mode).name
            raise NotImplementedError(f"weight_decay_mode={mode} is not supported, expected NONE")
        return RowwiseAdagrad(learning_rate, args.eps, initial)
    raise NotImplementedError(f"optimizer={kind.name} is not supported, expected EXACT_SGD or EXACT_ROWWISE_ADAGRAD")


def warn_of_unused_weight_decay(kind: EmbOptimType, args: OptimizerArgs) -> None:
    """FBGEMM ignores weight_decay where the optimizer, or the mode, has none. So do we, but not in silence."""
    unused = kind in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD) or (
        kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD and args.weight_decay_mode == WeightDecayMode.NONE
    )
    if unused and args.weight_decay != 0:
        mode = WeightDecayMode(args.weight_decay_mode).name
        warnings.warn(
            f"weight_decay={args.weight_decay} has no effect with optimizer {kind.name} and weight_decay_mode {mode},"
            " as in FBGEMM",
            stacklevel=4,
        )


def float_dtype(name: str, value: Any) -> torch.dtype:
    """The dtype of a `SparseType`, ours or FBGEMM's; NotImplementedError for a quantised one."""
    member = member_of(SparseType, name, value)
    if member.name not in FLOAT_DTYPES:
        raise NotImplementedError(f"{name}={member.name} is not supported, expected one of {', '.join(FLOAT_DTYPES)}")
    return FLOAT_DTYPES[member.name]


def bounds_check_of(mode: Any) -> tuple[str, int]:
    """Our name of a bounds check mode, and the version of FBGEMM's kernel that it asks for."""
    base = member_of(BoundsCheckMode, "bounds_check_mode", mode).name.removeprefix("V2_")
    return BOUNDS_CHECKS[base], 2 if base != mode.name else 1


@dataclasses.dataclass(frozen=True)
class Placement:
    """The tables of `embedding_specs` and where they lie."""

    tables: list[Table]
    specs: list[tuple[int, int, Any, Any]]  # as given, but DEVICE for a managed table that is placed there
    device: torch.device

    @property
    def place(self) -> str:
        """FBGEMM's name of the memory, as in weights_dev."""
        return "host" if self.specs[0][2].name == "HOST" else "dev"


def place_tables(
    embedding_specs: Sequence[tuple[int, int, Any, Any]],
    table_names: Sequence[str] | None,
    device: torch.device | str | int | None,
    managed_as_device: bool,
) -> Placement:
    """Check embedding_specs, table_names and device; see `SplitTableBatchedEmbeddingBagsCodegen`."""
    specs = [tuple(spec) for spec in embedding_specs]
    if not specs:
        raise ValueError("embedding_specs must have at least one table, got none")
    if table_names is not None and len(table_names) != len(specs):
        raise ValueError(f"table_names must have one name for each of {len(specs)} tables, got {len(table_names)}")
    tables, placed, computes = [], [], set()
    for number, spec in enumerate(specs):
        name = f"embedding_specs[{number}]"
        if len(spec) != 4:
            raise ValueError(f"{name} must be (rows, dim, EmbeddingLocation, ComputeDevice), got {spec!r}")
        rows, dim, location, compute = spec
        location = _check_location(name, location, managed_as_device)
        computes.add(member_of(ComputeDevice, name, compute))
        tables.append(Table(rows, dim, table_names[number] if table_names is not None else None))
        placed.append((rows, dim, location, compute))
    if len(computes) != 1:
        raise ValueError(f"embedding_specs must have one compute device for all tables, got {sorted(computes)}")
    (compute,) = computes
    if compute is ComputeDevice.MTIA:
        raise NotImplementedError("embedding_specs: ComputeDevice.MTIA is not supported, expected CUDA or CPU")
    expected = EmbeddingLocation.HOST if compute is ComputeDevice.CPU else EmbeddingLocation.DEVICE
    for number, (_, _, location, _) in enumerate(placed):
        if location.name != expected.name:
            raise ValueError(
                f"embedding_specs[{number}] must have location {expected.name} with ComputeDevice.{compute.name},"
                f" got {location.name}"
            )
    return Placement(tables, placed, _device_of(device, compute))


def _check_location(name: str, location: Any, managed_as_device: bool) -> Any:
    """The location; DEVICE, of the caller's enumeration, for a managed table that is placed there."""
    member = member_of(EmbeddingLocation, name, location)
    if member in MANAGED:
        if not managed_as_device:
            raise NotImplementedError(
                f"{name} has location {member.name}: unified memory and its cache are not supported; use DEVICE,"
                " or managed_as_device=True to place such tables in device memory"
            )
        return type(location).DEVICE
    if member is EmbeddingLocation.MTIA:
        raise NotImplementedError(f"{name} has location MTIA, which is not supported, expected DEVICE or HOST")
    return location


def _device_of(device: torch.device | str | int | None, compute: ComputeDevice) -> torch.device:
    if device is None:
        if compute is ComputeDevice.CPU:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    result = torch.device(device)
    if compute is ComputeDevice.CPU and result.type not in ("cpu", "meta"):
        raise ValueError(f"device must be cpu with ComputeDevice.CPU, got {result}")
    return result


def refuse(**arguments: tuple[Any, Any]) -> None:
    """NotImplementedError for the first of name=(value, supported value) that is not the supported value."""
    for name, (value, supported) in arguments.items():
        if value is not supported and value != supported:
            raise NotImplementedError(f"{name}={value!r} is not supported, expected {supported!r}")


def refuse_extra_optimizer_config(config: Any) -> None:
    """None or an object none of whose flags is set."""
    if config is None:
        return
    for field in dataclasses.fields(config):
        if getattr(config, field.name):
            raise NotImplementedError(
                f"extra_optimizer_config: {field.name}={getattr(config, field.name)!r} is not supported, expected False"
            )


def refuse_state_dtypes(dtypes: dict[str, Any] | None) -> None:
    """Optimizer states are fp32."""
    for state, dtype in (dtypes or {}).items():
        if member_of(SparseType, f"optimizer_state_dtypes[{state!r}]", dtype) is not SparseType.FP32:
            raise NotImplementedError(f"optimizer_state_dtypes[{state!r}]={dtype.name} is not supported, expected FP32")
