"""docs/migration.md, row by row: every argument of FBGEMM's class has one, and does what it says.

Signatures are read from the installed FBGEMM, so an argument that a new release adds fails here. Methods and
attributes: test_migration_methods.py.
"""

import inspect
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from migration_cases import FEATURES, OURS, PROMISED, TABLES, build, plain, read_table, train

import fbtriton
import fbtriton.fbgemm_api
from fbtriton import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SparseType,
    WeightDecayMode,
)
from fbtriton.testing import SPACING, assert_close

ROUNDED = 4 * SPACING[torch.float16]  # each of three steps may round to the other neighbour, as may the result
EARLIER = ("ar_alpha", "ema_beta", "min_shrinkage")  # FBGEMM 1.9 has these in the middle, which moves what follows
ENUMERATIONS = [
    "BoundsCheckMode", "CacheAlgorithm", "ComputeDevice", "EmbeddingLocation", "OptimType", "PoolingMode", "SparseType",
    "WeightDecayMode",
]  # fmt: skip

ARGUMENT_ROWS = read_table("Constructor")
ADDED_ROWS = read_table("Constructor", verdicts=False)
FORWARD_ROWS = read_table("Forward")


def parameters(function):
    return list(inspect.signature(function).parameters.values())[1:]


def test_constructor_has_a_row_for_every_argument():
    names = [parameter.name for parameter in parameters(OURS.__init__)]
    assert sorted(names) == sorted([*ARGUMENT_ROWS, *ADDED_ROWS])


@pytest.mark.parity
def test_constructor_is_fbgemms(fbgemm):
    """Names, order and defaults; the last few are missing in older releases."""
    theirs, ours = (parameters(kind.__init__) for kind in (fbgemm.SplitTableBatchedEmbeddingBagsCodegen, OURS))
    order = [p.name for p in ours if p.name not in EARLIER and p.name not in ADDED_ROWS]
    names = [p.name for p in theirs if p.name not in EARLIER]
    assert names == order[: len(names)]
    defaults = {p.name: p.default for p in ours}
    for parameter in theirs:
        assert plain(parameter.default) == plain(defaults[parameter.name]), parameter.name


@pytest.mark.parity
def test_forward_is_fbgemms(fbgemm):
    theirs, ours = (parameters(kind.forward) for kind in (fbgemm.SplitTableBatchedEmbeddingBagsCodegen, OURS))
    assert [(p.name, p.default) for p in theirs] == [(p.name, p.default) for p in ours]
    assert [p.name for p in ours] == list(FORWARD_ROWS)


@pytest.mark.parity
@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations_are_fbgemms(fbgemm, name):
    theirs, ours = getattr(fbgemm, name), getattr(fbtriton.fbgemm_api, name)
    known = {member.name: member.value for member in ours}
    assert {member.name: known.get(member.name) for member in theirs} == {m.name: m.value for m in theirs}


# Constructor: what each value does


@dataclass(frozen=True)
class Argument:
    """Values that FBGEMM's CPU build and ours take, those that ours takes alone, and those that it refuses. `acts`: a
    value that is taken changes what is computed."""

    taken: list[Any] = field(default_factory=list)
    alone: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)
    acts: bool = True
    tolerance: float = PROMISED


def sparse(names):
    return [SparseType[name] for name in names]


@dataclass
class Flags:
    use_rowwise_bias_correction: bool = False
    use_writeback_bwd_prehook: bool = False


HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)
ACTING = {
    "embedding_specs": Argument(
        taken=[[(*table, *HOST) for table in ((11, 4), (7, 12), (5, 8))]],
        refused=[
            [(3, 4, EmbeddingLocation.MANAGED, ComputeDevice.CUDA)],
            [(3, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)],
            [(3, 4, EmbeddingLocation.HOST, ComputeDevice.CUDA)],
            [(3, 4, EmbeddingLocation.DEVICE, ComputeDevice.CPU)],
            [(3, 4, EmbeddingLocation.MTIA, ComputeDevice.MTIA)],
            [(3, 4)],
            [(3, 4, *HOST), (3, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
            [],
        ],
    ),
    "feature_table_map": Argument(taken=[[0, 1, 1, 2]], refused=[[0, 1, 3], [0, 0, 1]]),
    "weights_precision": Argument(
        taken=sparse(["FP16"]), alone=sparse(["BF16"]), refused=sparse(["INT8", "NFP8", "INT4"]), tolerance=ROUNDED
    ),
    "output_dtype": Argument(
        taken=sparse(["FP16"]), alone=sparse(["BF16"]), refused=sparse(["INT8", "FP8"]), tolerance=ROUNDED
    ),
    "optimizer": Argument(
        taken=[OptimType.EXACT_SGD, OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD],
        alone=[
            OptimType.LARS_SGD,
            OptimType.ADAM,
            OptimType.PARTIAL_ROWWISE_ADAM,
            OptimType.LAMB,
            OptimType.PARTIAL_ROWWISE_LAMB,
            OptimType.NONE,
        ],
        refused=[OptimType.SHAMPOO, OptimType.ROWWISE_ADAGRAD, OptimType.ENSEMBLE_ROWWISE_ADAGRAD],
    ),
    "stochastic_rounding": Argument(taken=[False], acts=False),
    "gradient_clipping": Argument(taken=[True]),
    "max_gradient": Argument(taken=[0.25], acts=False),
    "max_norm": Argument(alone=[0.5], refused=[-1.0]),
    "learning_rate": Argument(taken=[0.5], refused=[-1.0]),
    "eps": Argument(taken=[0.5], refused=[-1.0]),
    "momentum": Argument(taken=[0.5], acts=False),
    "weight_decay": Argument(taken=[0.25], acts=False),
    "weight_decay_mode": Argument(
        taken=[WeightDecayMode.L2, WeightDecayMode.DECOUPLE],
        refused=[WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP, WeightDecayMode.DECOUPLE_GLOBAL],
        acts=False,
    ),
    "eta": Argument(taken=[0.5], acts=False),
    "beta1": Argument(taken=[0.5], acts=False),
    "beta2": Argument(taken=[0.5], acts=False),
    "optimizer_state_dtypes": Argument(
        alone=[{"momentum1": SparseType.FP32, "momentum2": SparseType.FP32}],
        refused=[{"momentum1": SparseType.BF16}, {"momentum2": SparseType.FP16}, {"momentum3": SparseType.FP32}],
        acts=False,
    ),
    "pooling_mode": Argument(taken=[PoolingMode.MEAN, PoolingMode.NONE], refused=["sum"]),
    "device": Argument(taken=["cpu"], alone=[torch.device("cpu")], refused=["cuda"], acts=False),
    "bounds_check_mode": Argument(taken=list(BoundsCheckMode), refused=["warning"], acts=False),
    "table_names": Argument(taken=[["a", "b", "c"]], refused=[["a"]], acts=False),
    "embedding_table_index_type": Argument(taken=[torch.int32], refused=[torch.int16], acts=False),
    "embedding_table_offset_type": Argument(taken=[torch.int32], refused=[torch.float32], acts=False),
    "embedding_shard_info": Argument(taken=[[(20, 8, 0, 0)] * 3], acts=False),
}
NO_EFFECT = {
    "cache_algorithm": [fbtriton.fbgemm_api.CacheAlgorithm.LFU],
    "cache_load_factor": [0.5],
    "cache_sets": [8],
    "cache_reserved_memory": [1.0],
    "cache_precision": sparse(["FP32", "FP16"]),
    "enforce_hbm": [True],
    "record_cache_metrics": [SimpleNamespace(record_cache_miss_counter=True, record_tablewise_cache_miss=True)],
    "gather_uvm_cache_stats": [True],
    "use_experimental_tbe": [True],
    "prefetch_pipeline": [True],
    "stats_reporter_config": [SimpleNamespace(interval=10)],
    "multipass_prefetch_config": [SimpleNamespace(num_passes=4)],
    "uvm_host_mapped": [True],
    "tbe_input_multiplexer_config": [SimpleNamespace(start_batch=0)],
    "res_params": [SimpleNamespace(res_store_shards=4)],
    "ar_alpha": [0.5],
    "ema_beta": [0.5],
    "min_shrinkage": [0.5],
}
REFUSED = {
    "ensemble_mode": [SimpleNamespace(step_ema=10)],
    "emainplace_mode": [SimpleNamespace(step_ema=10)],
    "counter_based_regularization": [SimpleNamespace(counter_halflife=1)],
    "cowclip_regularization": [SimpleNamespace(counter_halflife=1)],
    "uvm_non_rowwise_momentum": [True],
    "global_weight_decay": [SimpleNamespace(start_iter=0)],
    "extra_optimizer_config": [Flags(use_rowwise_bias_correction=True), Flags(use_writeback_bwd_prehook=True)],
    "enable_raw_embedding_streaming": [True],
    "is_qr_tbe": [True],
    "preallocated_host_buffers": [{"weights": torch.zeros(1)}],
}


def test_every_argument_is_tried():
    verdicts = dict.fromkeys(NO_EFFECT, "no effect") | dict.fromkeys(REFUSED, "error")
    assert not set(NO_EFFECT) & set(REFUSED)
    assert {name: verdict for name, verdict in ARGUMENT_ROWS.items() if verdict in ("no effect", "error")} == verdicts
    assert {name for name, verdict in ARGUMENT_ROWS.items() if verdict in ("same", "better")} == set(ACTING)


REFUSALS = [(name, value) for name, values in REFUSED.items() for value in values]
REFUSALS += [(name, value) for name, argument in ACTING.items() for value in argument.refused]


@pytest.mark.parametrize("name, value", REFUSALS, ids=lambda value: str(value)[:30])
def test_refused_with_the_name(name, value):
    with pytest.raises((ValueError, NotImplementedError), match=name):
        build(fbtriton, name, value)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_no_effect(name):
    expected = train(build(fbtriton))
    for value in NO_EFFECT[name]:
        for actual, other in zip(train(build(fbtriton, name, value)), expected, strict=True):
            assert torch.equal(actual, other)


def test_accepted_without_a_flag():
    """A configuration that asks for nothing."""
    expected = train(build(fbtriton))
    assert all(map(torch.equal, train(build(fbtriton, "extra_optimizer_config", Flags())), expected))


TAKEN_BY_BOTH = [(name, value) for name, argument in ACTING.items() for value in argument.taken]
TAKEN = TAKEN_BY_BOTH + [(name, value) for name, argument in ACTING.items() for value in argument.alone]


@pytest.mark.filterwarnings("ignore:weight_decay")
@pytest.mark.parametrize("name, value", TAKEN, ids=lambda value: str(value)[:30])
def test_taken(name, value):
    """It changes what is computed, or it does not, as the document and the table above have it."""
    default = train(build(fbtriton))
    results = train(build(fbtriton, name, value))
    assert all(torch.isfinite(result).all() for result in results)
    same = len(results) == len(default) and all(map(torch.equal, results, default))
    is_default = value is OptimType.EXACT_ROWWISE_ADAGRAD
    assert same == (not ACTING[name].acts or is_default)


def translated(library, value):
    """Our enumerations in FBGEMM's."""
    if isinstance(value, (list, tuple)):
        return type(value)(translated(library, part) for part in value)
    kind = type(value).__name__
    kind = {"EmbOptimType": "OptimType"}.get(kind, kind)
    return getattr(library, kind)[value.name] if kind in ENUMERATIONS else value


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:weight_decay")
@pytest.mark.parametrize("name, value", TAKEN_BY_BOTH, ids=lambda value: str(value)[:30])
def test_fbgemm_computes_the_same(name, value, fbgemm):
    """Both take FBGEMM's own enumerations. Without stochastic rounding, whose noise differs."""
    given = translated(fbgemm, value)
    options = {"stochastic_rounding": False} if name != "stochastic_rounding" else {}
    torch.use_deterministic_algorithms(False)
    arguments = build_arguments(fbgemm, name, given, options)
    theirs, ours = (kind(**arguments) for kind in (fbgemm.SplitTableBatchedEmbeddingBagsCodegen, OURS))
    for number, views in enumerate(zip(theirs.split_embedding_weights(), ours.split_embedding_weights(), strict=True)):
        initial = torch.rand(views[0].shape, generator=torch.Generator().manual_seed(number))
        for view in views:
            view.detach().copy_(initial)
    for number, (actual, expected) in enumerate(zip(train(ours), train(theirs), strict=True)):
        assert_close(actual, expected, tolerance=ACTING[name].tolerance, name=f"result {number}")


def build_arguments(library, name, value, options):
    place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
    return {
        "embedding_specs": [(*table, *place) for table in TABLES], "feature_table_map": FEATURES,
        "optimizer": library.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, **options, name: value,
    }  # fmt: skip


def test_unused_weight_decay_is_said():
    with pytest.warns(UserWarning, match="weight_decay=0.5 has no effect with optimizer EXACT_ROWWISE_ADAGRAD"):
        build(fbtriton, "weight_decay", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(fbtriton)


# What is better


def test_dims_that_fbgemm_refuses(any_device):
    """1, 6 and 2100 columns in one module, with bf16 weights."""
    host = any_device.type == "cpu"
    place = HOST if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    specs = [(5, dim, *place) for dim in (1, 6, 2100)]
    tbe = OURS(specs, weights_precision=SparseType.BF16, learning_rate=1.0, device=any_device)
    tbe.init_embedding_weights_uniform(-1, 1)
    before = [view.clone() for view in tbe.split_embedding_weights()]
    output = tbe(torch.tensor([1, 2, 3], device=any_device), torch.arange(4, device=any_device))
    expected = torch.cat([view[row].float() for view, row in zip(before, (1, 2, 3), strict=True)])
    assert torch.equal(output[0], expected)
    output.backward(torch.ones_like(output))
    for view, old, row in zip(tbe.split_embedding_weights(), before, (1, 2, 3), strict=True):
        assert_close(view[row].float(), old[row].float() - 1, tolerance=2.0**-7, name="weights")


@pytest.mark.parity
@pytest.mark.parametrize("dim", [1, 6])
def test_fbgemm_refuses_these_dims(dim, fbgemm):
    with pytest.raises(AssertionError):
        fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [(5, dim, fbgemm.EmbeddingLocation.DEVICE, fbgemm.ComputeDevice.CUDA)], device="meta"
        )


def test_initial_accumulator():
    tbe = build(fbtriton, "initial_accumulator_value", 0.25)
    assert torch.equal(tbe.momentum1_host, torch.full((23,), 0.25))
    with pytest.raises(ValueError, match="initial_accumulator_value must be 0 with optimizer EXACT_SGD, got 0.25"):
        build(fbtriton, "initial_accumulator_value", 0.25, optimizer=OptimType.EXACT_SGD)


def test_padded_indices():
    """Ids after the last offset belong to no bag; FBGEMM gives them to the last."""
    tbe, expected = build(fbtriton), build(fbtriton)
    offsets = torch.tensor([0, 2, 3, 3, 4])
    padded, ids = torch.tensor([1, 2, 3, 1, -1, 5, 999]), torch.tensor([1, 2, 3, 1])
    outputs = tbe(padded, offsets), expected(ids, offsets)
    assert torch.equal(*outputs)
    for output in outputs:
        output.sum().backward()
    assert torch.equal(tbe.bags.weights, expected.bags.weights) and tbe.bounds_check_warning.item() == 0
