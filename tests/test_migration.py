"""docs/migration.md, row by row: every argument, method and attribute of FBGEMM's class has one, and does what it says.

The tables of FBGEMM's signature are read from the installed FBGEMM, so an argument that a new release adds fails here.
"""

import inspect
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
from fbtriton.testing import SPACING, assert_close, make_batch

OURS = fbtriton.SplitTableBatchedEmbeddingBagsCodegen
TABLES = ((11, 8), (7, 8), (5, 8))
FEATURES = [0, 0, 1, 2]
PROMISED = 1e-5  # as in test_parity.py
ROUNDED = 4 * SPACING[torch.float16]  # each of three steps may round to the other neighbour, as may the result
VERDICTS = {"same", "better", "no effect", "error"}
EARLIER = ("ar_alpha", "ema_beta", "min_shrinkage")  # FBGEMM 1.9 has these in the middle, which moves what follows


def read_table(title, verdicts=True):
    """The rows of a section of the document: {name: verdict}."""
    text = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        names = re.findall(r"`(\w+)`", cells[0]) if cells else []
        if len(cells) == (3 if verdicts else 2) and names:
            for name in names:
                assert name not in rows, f"{name} has two rows"
                rows[name] = cells[1]
    assert rows and (not verdicts or set(rows.values()) <= VERDICTS)
    return rows


ARGUMENT_ROWS = read_table("Constructor")
ADDED_ROWS = read_table("Constructor", verdicts=False)
FORWARD_ROWS = read_table("Forward")
METHOD_ROWS = read_table("Methods")
ATTRIBUTE_ROWS = read_table("Attributes and buffers")


@pytest.fixture
def fbgemm():
    pytest.importorskip("fbgemm_gpu", reason="needs fbgemm_gpu, which is not installed")
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


def parameters(function):
    return list(inspect.signature(function).parameters.values())[1:]


def test_constructor_has_a_row_for_every_argument():
    names = [parameter.name for parameter in parameters(OURS.__init__)]
    assert sorted(names) == sorted([*ARGUMENT_ROWS, *ADDED_ROWS])


def plain(value):
    return value.name if hasattr(value, "name") and not isinstance(value, torch.device) else value


@pytest.mark.parity
def test_constructor_is_fbgemms(fbgemm):
    """Names, order and defaults."""
    theirs, ours = (parameters(kind.__init__) for kind in (fbgemm.SplitTableBatchedEmbeddingBagsCodegen, OURS))
    order = [p.name for p in ours if p.name not in EARLIER and p.name not in ADDED_ROWS]
    assert [p.name for p in theirs if p.name not in EARLIER] == order
    defaults = {p.name: p.default for p in ours}
    for parameter in theirs:
        assert plain(parameter.default) == plain(defaults[parameter.name]), parameter.name


@pytest.mark.parity
def test_forward_is_fbgemms(fbgemm):
    theirs, ours = (parameters(kind.forward) for kind in (fbgemm.SplitTableBatchedEmbeddingBagsCodegen, OURS))
    assert [(p.name, p.default) for p in theirs] == [(p.name, p.default) for p in ours]
    assert [p.name for p in ours] == list(FORWARD_ROWS)


ENUMERATIONS = [
    "BoundsCheckMode", "CacheAlgorithm", "ComputeDevice", "EmbeddingLocation", "OptimType", "PoolingMode", "SparseType",
    "WeightDecayMode",
]  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", ENUMERATIONS)
def test_enumerations_are_fbgemms(fbgemm, name):
    theirs, ours = getattr(fbgemm, name), getattr(fbtriton.fbgemm_api, name)
    known = {member.name: member.value for member in ours}
    assert {member.name: known.get(member.name) for member in theirs} == {m.name: m.value for m in theirs}


# Constructor: what each value does


def build(library, name=None, value=None, tables=TABLES, **options):
    """A module on the CPU, ours or FBGEMM's, with one argument set."""
    place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
    arguments = {
        "embedding_specs": [(*table, *place) for table in tables],
        "feature_table_map": FEATURES, "optimizer": library.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1,
    } | options  # fmt: skip
    if name is not None:
        arguments[name] = value
    torch.manual_seed(0)
    tbe = library.SplitTableBatchedEmbeddingBagsCodegen(**arguments)
    for number, view in enumerate(tbe.split_embedding_weights()):
        view.detach().copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(number)))
    return tbe


def train(tbe, steps=3):
    """Outputs of the steps, and the weights, in fp32."""
    results = []
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        features = tbe.rows_per_table.tolist()
        batch = make_batch(features, torch.randint(0, 4, (len(features), 5), generator=generator), seed=seed)
        output = tbe(batch.indices, batch.offsets)
        output.float().square().sum().backward()
        results.append(output.detach().float())
    return [*results, *(view.detach().float() for view in tbe.split_embedding_weights())]


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
        taken=[OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD],
        refused=[OptimType.SHAMPOO, OptimType.ROWWISE_ADAGRAD, OptimType.ENSEMBLE_ROWWISE_ADAGRAD],
    ),
    "stochastic_rounding": Argument(taken=[False], acts=False),
    "max_gradient": Argument(taken=[0.25], acts=False),
    "learning_rate": Argument(taken=[0.5], refused=[-1.0]),
    "eps": Argument(taken=[0.5], refused=[-1.0]),
    "momentum": Argument(taken=[0.5], acts=False),
    "weight_decay": Argument(taken=[0.25], acts=False),
    "eta": Argument(taken=[0.5], acts=False),
    "beta1": Argument(taken=[0.5], acts=False),
    "beta2": Argument(taken=[0.5], acts=False),
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
    "gradient_clipping": [True],
    "max_norm": [0.5],
    "weight_decay_mode": [mode for mode in WeightDecayMode if mode is not WeightDecayMode.NONE],
    "ensemble_mode": [SimpleNamespace(step_ema=10)],
    "emainplace_mode": [SimpleNamespace(step_ema=10)],
    "counter_based_regularization": [SimpleNamespace(counter_halflife=1)],
    "cowclip_regularization": [SimpleNamespace(counter_halflife=1)],
    "uvm_non_rowwise_momentum": [True],
    "optimizer_state_dtypes": [{"momentum1": SparseType.BF16}, {"momentum1": SparseType.FP16}],
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
    """Configurations that ask for nothing."""
    expected = train(build(fbtriton))
    options = {"extra_optimizer_config": Flags(), "optimizer_state_dtypes": {"momentum1": SparseType.FP32}}
    for name, value in options.items():
        assert all(map(torch.equal, train(build(fbtriton, name, value)), expected))


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


# Methods


@pytest.mark.parity
def test_methods_are_fbgemms(fbgemm):
    """Every public method of FBGEMM's has a row, and ours takes the same arguments."""
    kind = fbgemm.SplitTableBatchedEmbeddingBagsCodegen
    names = {name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert names == set(METHOD_ROWS)
    for name in names:
        theirs, ours = (list(inspect.signature(getattr(each, name)).parameters) for each in (kind, OURS))
        assert theirs == ours, name


CALLS = {
    "split_embedding_weights": (),
    "split_optimizer_states": (),
    "get_optimizer_state": (),
    "get_optimizer_buffer": ("momentum2_dev",),
    "get_states": ("momentum1",),
    "get_all_states": (),
    "init_embedding_weights_uniform": (2.0, 2.0),
    "set_learning_rate": (0.25,),
    "get_learning_rate": (),
    "update_hyper_parameters": ({"lr": 0.125, "eps": 0.5, "beta1": 0.5, "weight_decay": 0.0, "lower_bound": 0.0},),
    "set_optimizer_step": (7,),
    "flush": (),
    "reset_cache_states": (),
    "get_prefetch_passes": (None, torch.arange(3), torch.arange(3)),
    "get_cache_miss_counter": (),
    "get_table_wise_cache_miss": (),
    "get_uvm_cache_stats": (),
    "reset_uvm_cache_stats": (),
    "print_uvm_cache_stats": (),
    "raw_embedding_stream": (),
    "should_log": (),
    "log": ("a message",),
    "get_table_name_for_logging": (["b", "a", "b"],),
}
ELSEWHERE = {  # where FBGEMM's needs a GPU, or the results differ as the document says
    "forward": "test_fbgemm_computes_the_same",
    "prefetch": "test_prefetch_does_nothing",
    "prepare_inputs": "test_prepare_inputs",
    "reset_embedding_weight_momentum": "test_fbgemm_api.py::test_reset_of_rows",
}
REFUSED_METHODS = {"ema_inplace": ({},), "ensemble_and_swap": ({},), "writeback_hook": (None, (torch.zeros(1),))}


def test_every_method_is_called():
    assert {*CALLS, *ELSEWHERE, *REFUSED_METHODS} == set(METHOD_ROWS)
    assert {name for name, verdict in METHOD_ROWS.items() if verdict == "error"} == set(REFUSED_METHODS)


@pytest.mark.parametrize("name", REFUSED_METHODS)
def test_refused_methods(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        getattr(build(fbtriton), name)(*REFUSED_METHODS[name])


def assert_alike(ours, theirs, name):
    """Of one type, and equal: tensors, numbers, names of enumerations, lists, dicts and tuples of them."""
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
        assert_close(ours.detach(), theirs.detach(), tolerance=PROMISED, name=name)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), name
        for key, value in theirs.items():
            assert_alike(ours[key], value, f"{name}[{key}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), name
        for number, value in enumerate(theirs):
            assert_alike(ours[number], value, f"{name}[{number}]")
    else:
        assert plain(ours) == plain(theirs), name


@pytest.mark.parity
@pytest.mark.parametrize("name", CALLS)
def test_methods_return_what_fbgemms_return(name, fbgemm):
    """And leave behind what FBGEMM's leave: a step of training afterwards ends alike."""
    theirs, ours = (build(library, gather_uvm_cache_stats="uvm_cache" in name) for library in (fbgemm, fbtriton))
    torch.use_deterministic_algorithms(False)
    train(theirs), train(ours)
    if "uvm_cache" in name and name != "get_uvm_cache_stats":
        assert getattr(ours, name)() is None  # FBGEMM's prints and resets what only a cache has
        return
    assert_alike(*(getattr(tbe, name)(*CALLS[name]) for tbe in (ours, theirs)), name)
    assert_alike(train(ours), train(theirs), name)
    assert ours.get_learning_rate() == theirs.get_learning_rate()


def test_prefetch_does_nothing():
    tbe, expected = build(fbtriton), build(fbtriton)
    assert tbe.prefetch(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1])) is None
    assert all(map(torch.equal, train(tbe), train(expected)))


def test_prepare_inputs():
    ids, offsets, weights = torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1], dtype=torch.int32), torch.ones(1)
    tbe = build(fbtriton)
    ids_, offsets_, weights_, sizes = tbe.prepare_inputs(ids, offsets, weights)
    assert ids_ is ids and offsets_ is offsets and weights_ is weights and sizes is None
    assert tbe(ids_, offsets_, weights_).shape == (1, 32)


# Attributes and buffers


def is_public_data(tbe, name):
    return not name.startswith("_") and not callable(getattr(type(tbe), name, None))


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_attributes_are_fbgemms(optimizer, fbgemm):
    options = {"optimizer": fbgemm.OptimType[optimizer], "table_names": ["a", "b", "c"]}
    torch.use_deterministic_algorithms(False)
    theirs, ours = (build(library, **options) for library in (fbgemm, fbtriton))
    train(theirs), train(ours)
    held = [*vars(theirs), *dict(theirs.named_buffers()), *dict(theirs.named_parameters())]
    names = {name for name in held if is_public_data(theirs, name)}
    assert names <= set(ATTRIBUTE_ROWS), f"no row for {sorted(names - set(ATTRIBUTE_ROWS))}"
    special = {"uuid", "learning_rate_tensor", "optimizer_args", "uvm_cache_stats", "local_uvm_cache_stats"}
    for name in sorted(names):
        verdict = ATTRIBUTE_ROWS[name]
        assert hasattr(ours, name) == (verdict != "error"), name
        if verdict in ("same", "no effect") and name not in special:
            assert_alike(getattr(ours, name), getattr(theirs, name), name)
    args, theirs_args = ours.optimizer_args, theirs.optimizer_args
    assert {f: getattr(theirs_args, f) for f in args._fields} == args._asdict()
    assert torch.equal(ours.learning_rate_tensor, theirs.learning_rate_tensor)
    assert len(ours.uuid) == len(theirs.uuid)


def test_attributes_have_rows():
    """What the document promises is there, also without FBGEMM."""
    tbe = build(fbtriton)
    for name, verdict in ATTRIBUTE_ROWS.items():
        assert hasattr(tbe, name) == (verdict != "error"), name
