"""docs/migration.md, row by row: every method and attribute of FBGEMM's class has one, and does what it says.

They are read from the installed FBGEMM, so that one that a new release adds fails here.
"""

import inspect

import pytest
import torch
from migration_cases import ON_FBGEMMS_CPU, OPTIMIZERS, OURS, PROMISED, build, build_like_cuda, plain, read_table, train

import fbtriton
from fbtriton.testing import assert_close

METHOD_ROWS = read_table("Methods")
ATTRIBUTE_ROWS = read_table("Attributes and buffers")


@pytest.mark.parity
def test_methods_are_fbgemms(fbgemm):
    """Every public method of FBGEMM's has a row, and ours takes the same arguments; older releases have fewer."""
    kind = fbgemm.SplitTableBatchedEmbeddingBagsCodegen
    names = {name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))}
    assert names <= set(METHOD_ROWS)
    for name in names:
        theirs, ours = (list(inspect.signature(getattr(each, name)).parameters) for each in (kind, OURS))
        assert theirs == ours[: len(theirs)], name


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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_attributes_are_fbgemms(optimizer, fbgemm):
    """After training, where FBGEMM trains on a CPU."""
    options = {"optimizer": fbgemm.OptimType[optimizer], "table_names": ["a", "b", "c"]}
    torch.use_deterministic_algorithms(False)
    if optimizer in ON_FBGEMMS_CPU:
        theirs, ours = (build(library, **options) for library in (fbgemm, fbtriton))
        train(theirs), train(ours)
    else:
        theirs, ours = (build_like_cuda(library, **options) for library in (fbgemm, fbtriton))
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
    tbe = build(fbtriton, optimizer=fbtriton.OptimType.ADAM)
    for name, verdict in ATTRIBUTE_ROWS.items():
        assert hasattr(tbe, name) == (verdict != "error"), name
