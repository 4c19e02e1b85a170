"""What FBGEMM's constructor arguments mean here: the optimizer they name, and what is refused.

`docs/migration.md` has the same, argument by argument.
"""

from __future__ import annotations

import dataclasses
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
from fbtriton.optim import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    LarsSGD,
    NoOptimizer,
    Optimizer,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    check_range,
)

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


# Our class of each of FBGEMM's optimizers, and the arguments that become its numbers, under the same names.
MOMENTS = ("beta1", "beta2", "eps", "weight_decay")
OPTIMIZERS: dict[EmbOptimType, tuple[type[Optimizer], tuple[str, ...]]] = {
    EmbOptimType.EXACT_SGD: (SGD, ()),
    EmbOptimType.LARS_SGD: (LarsSGD, ("momentum", "eta", "weight_decay")),
    EmbOptimType.EXACT_ADAGRAD: (Adagrad, ("eps",)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (RowwiseAdagrad, ("eps", "weight_decay", "max_norm")),
    EmbOptimType.ADAM: (Adam, MOMENTS),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (PartialRowwiseAdam, MOMENTS),
    EmbOptimType.LAMB: (Lamb, MOMENTS),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: (PartialRowwiseLamb, MOMENTS),
    EmbOptimType.NONE: (NoOptimizer, ()),
}
ADAGRADS = (EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)  # start from initial_accumulator_value
ADAMS = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)  # may keep their states in bf16
DECAYS = {WeightDecayMode.NONE: "none", WeightDecayMode.L2: "l2", WeightDecayMode.DECOUPLE: "decoupled"}
StateDtypes = tuple[torch.dtype, torch.dtype]  # of momentum1 and momentum2


def make_optimizer(
    kind: EmbOptimType, learning_rate: float, args: OptimizerArgs, initial: float, state_dtypes: StateDtypes
) -> Optimizer:
    """The optimizer that FBGEMM's arguments describe.

    Args:
        kind: FBGEMM's optimizer.
        initial: value of Adagrad's accumulators at the start.
        state_dtypes: from `state_dtypes_of`.

    Raises:
        NotImplementedError: the optimizer, or what is asked of it, does not exist here.
        ValueError: a number is out of range, or means nothing for this optimizer.
    """
    if kind not in OPTIMIZERS:
        known = ", ".join(each.name for each in OPTIMIZERS)
        raise NotImplementedError(f"optimizer={kind.name} is not supported, expected one of {known}")
    mode = WeightDecayMode(args.weight_decay_mode)
    if mode not in DECAYS:
        known = ", ".join(each.name for each in DECAYS)
        raise NotImplementedError(f"weight_decay_mode={mode.name} is not supported, expected one of {known}")
    check_range("learning_rate", learning_rate)
    if args.gradient_clipping and not args.max_gradient > 0:
        raise ValueError(f"max_gradient must be > 0 with gradient_clipping, got {args.max_gradient!r}")
    made, names = OPTIMIZERS[kind]
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    options["max_gradient"] = args.max_gradient if args.gradient_clipping else 0.0
    if kind is not EmbOptimType.NONE:
        options["lr"] = learning_rate
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        options["weight_decay_mode"] = DECAYS[mode]
        if mode is WeightDecayMode.NONE:
            options["weight_decay"] = 0.0
    if kind in ADAMS:
        options["exp_avg_dtype"], options["exp_avg_sq_dtype"] = state_dtypes
    if kind in ADAGRADS:
        check_range("initial_accumulator_value", initial)
        options["initial_accumulator"] = initial
    elif initial != 0:
        raise ValueError(f"initial_accumulator_value must be 0 with optimizer {kind.name}, got {initial}")
    return made(**options)


def state_dtypes_of(kind: EmbOptimType, dtypes: dict[str, Any] | None) -> StateDtypes:
    """What `optimizer_state_dtypes` asks for: FP32, or with ADAM and PARTIAL_ROWWISE_ADAM BF16.

    Raises:
        NotImplementedError: another dtype. ValueError: the name of a state that no optimizer has.
    """
    result = {"momentum1": torch.float32, "momentum2": torch.float32}
    for state, value in (dtypes or {}).items():
        if state not in result:
            raise ValueError(f"optimizer_state_dtypes must have names of {', '.join(result)}, got {state!r}")
        name = f"optimizer_state_dtypes[{state!r}]"
        dtype = float_dtype(name, value)
        if dtype == torch.float16 or (dtype == torch.bfloat16 and kind not in ADAMS):
            expected = "FP32 or BF16" if kind in ADAMS else "FP32"
            raise NotImplementedError(
                f"{name}={value.name} is not supported with optimizer {kind.name}, expected {expected}"
            )
        result[state] = dtype
    return result["momentum1"], result["momentum2"]


def warn_of_unused(kind: EmbOptimType, args: OptimizerArgs) -> None:
    """FBGEMM ignores numbers that the optimizer, or the weight decay mode, does not have. So do we, but for those that
    limit the weights not in silence."""
    mode = WeightDecayMode(args.weight_decay_mode)
    _, names = OPTIMIZERS[kind]
    unused = []
    if args.max_norm != 0 and "max_norm" not in names:
        unused.append(f"max_norm={args.max_norm}")
    if args.weight_decay != 0:
        by_mode = kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD
        if "weight_decay" not in names or (by_mode and mode is WeightDecayMode.NONE):
            unused.append(f"weight_decay={args.weight_decay}")
        elif mode is not WeightDecayMode.NONE and not by_mode:
            unused.append(f"weight_decay_mode={mode.name}")
    for number in unused:
        warnings.warn(
            f"{number} has no effect with optimizer {kind.name} and weight_decay_mode {mode.name}, as in FBGEMM",
            stacklevel=3,
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
