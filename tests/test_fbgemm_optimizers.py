"""FBGEMM's class with every optimizer: what its arguments make, what it keeps, and what it saves and loads.

That the optimizers compute what FBGEMM's do: test_parity.py.
"""

import copy
import warnings

import pytest
import torch
from migration_cases import (
    OPTIMIZERS,
    TABLES,
    build,
    build_like_cuda,
    fbgemm_state,
    load_into_fbgemm,
    train,
)
from test_fbgemm_api import assert_same_tables

import fbtriton
from fbtriton import (
    SGD,
    Adagrad,
    Adam,
    ComputeDevice,
    EmbeddingLocation,
    Lamb,
    LarsSGD,
    NoOptimizer,
    OptimType,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    SparseType,
    WeightDecayMode,
)
from fbtriton.fbgemm_state import STREAMING

COUNTING = ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB")
TRAINED = [name for name in OPTIMIZERS if name != "NONE"]
HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)

# Every number that an optimizer may read, none of them the default.
NUMBERS = {
    "learning_rate": 0.25, "eps": 0.5, "momentum": 0.75, "eta": 0.125, "beta1": 0.875, "beta2": 0.75,
    "weight_decay": 0.375, "max_norm": 1.5, "gradient_clipping": True, "max_gradient": 0.625,
}  # fmt: skip
MOMENTS = {"beta1": 0.875, "beta2": 0.75, "eps": 0.5, "weight_decay": 0.375}
BFLOAT16 = {"momentum1": SparseType.BF16, "momentum2": SparseType.BF16}
IN_BFLOAT16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
MADE = [
    ("EXACT_SGD", {}, SGD(0.25, max_gradient=0.625)),
    ("LARS_SGD", {}, LarsSGD(0.25, 0.75, 0.125, 0.375, max_gradient=0.625)),
    ("EXACT_ADAGRAD", {}, Adagrad(0.25, 0.5, max_gradient=0.625)),
    ("EXACT_ADAGRAD", {"initial_accumulator_value": 2.0}, Adagrad(0.25, 0.5, 2.0, max_gradient=0.625)),
    ("EXACT_ROWWISE_ADAGRAD", {}, RowwiseAdagrad(0.25, 0.5, max_norm=1.5, max_gradient=0.625)),
    ("EXACT_ROWWISE_ADAGRAD", {"gradient_clipping": False}, RowwiseAdagrad(0.25, 0.5, max_norm=1.5)),
    (
        "EXACT_ROWWISE_ADAGRAD",
        {"weight_decay_mode": WeightDecayMode.L2, "initial_accumulator_value": 2.0},
        RowwiseAdagrad(0.25, 0.5, 2.0, 0.375, "l2", 1.5, max_gradient=0.625),
    ),
    (
        "EXACT_ROWWISE_ADAGRAD",
        {"weight_decay_mode": WeightDecayMode.DECOUPLE, "max_norm": 0.0},
        RowwiseAdagrad(0.25, 0.5, 0.0, 0.375, "decoupled", max_gradient=0.625),
    ),
    ("ADAM", {}, Adam(0.25, **MOMENTS, max_gradient=0.625)),
    ("ADAM", {"optimizer_state_dtypes": BFLOAT16}, Adam(0.25, **MOMENTS, **IN_BFLOAT16, max_gradient=0.625)),
    (
        "ADAM",
        {"optimizer_state_dtypes": {"momentum2": SparseType.BF16}},
        Adam(0.25, **MOMENTS, exp_avg_sq_dtype=torch.bfloat16, max_gradient=0.625),
    ),
    ("PARTIAL_ROWWISE_ADAM", {}, PartialRowwiseAdam(0.25, **MOMENTS, max_gradient=0.625)),
    (
        "PARTIAL_ROWWISE_ADAM",
        {"optimizer_state_dtypes": BFLOAT16},
        PartialRowwiseAdam(0.25, **MOMENTS, **IN_BFLOAT16, max_gradient=0.625),
    ),
    ("LAMB", {}, Lamb(0.25, **MOMENTS, max_gradient=0.625)),
    ("PARTIAL_ROWWISE_LAMB", {}, PartialRowwiseLamb(0.25, **MOMENTS, max_gradient=0.625)),
    ("NONE", {}, NoOptimizer(max_gradient=0.625)),
]


def test_every_optimizer_is_made():
    assert {name for name, _, _ in MADE} == set(OPTIMIZERS)


@pytest.mark.filterwarnings("ignore:.*has no effect with optimizer")
@pytest.mark.parametrize("name, options, expected", MADE, ids=[name for name, _, _ in MADE])
def test_arguments_make_the_optimizer(name, options, expected):
    """All of them, under FBGEMM's names; `Optimizer` is compared field by field."""
    tbe = build(fbtriton, optimizer=OptimType[name], **(NUMBERS | options))
    assert tbe.bags.optimizer == expected
    assert tuple(tbe.bags.hyperparameters.tolist()) == expected.hyperparameters
    assert tbe.bags.spec.max_gradient == expected.max_gradient
    states = dict(zip((state.name for state in expected.states), expected.state_dtypes, strict=True))
    assert {state: getattr(tbe.bags, state).dtype for state in states} == states


@pytest.mark.parametrize(
    "optimizer, options, message",
    [
        ("EXACT_SGD", {"max_norm": 0.5}, "max_norm=0.5 has no effect with optimizer EXACT_SGD"),
        ("ADAM", {"max_norm": 0.5}, "max_norm=0.5 has no effect with optimizer ADAM"),
        ("EXACT_ADAGRAD", {"weight_decay": 0.5}, "weight_decay=0.5 has no effect with optimizer EXACT_ADAGRAD"),
        ("NONE", {"weight_decay": 0.5}, "weight_decay=0.5 has no effect with optimizer NONE"),
        (
            "EXACT_ROWWISE_ADAGRAD",
            {"weight_decay": 0.5},
            "weight_decay=0.5 has no effect with optimizer EXACT_ROWWISE_ADAGRAD and weight_decay_mode NONE",
        ),
        (
            "LAMB",
            {"weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.L2},
            "weight_decay_mode=L2 has no effect with optimizer LAMB",
        ),
    ],
)
def test_what_is_not_used_is_said(optimizer, options, message):
    with pytest.warns(UserWarning, match=message) as caught:
        build(fbtriton, optimizer=OptimType[optimizer], **options)
    assert len(caught) == 1


@pytest.mark.parametrize("optimizer", ["ADAM", "LARS_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_what_is_used_is_not_warned_of(optimizer):
    rowwise = optimizer == "EXACT_ROWWISE_ADAGRAD"
    options = {"weight_decay_mode": WeightDecayMode.L2, "max_norm": 1.0} if rowwise else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(fbtriton, optimizer=OptimType[optimizer], weight_decay=0.5, **options)


@pytest.mark.parametrize(
    "optimizer, options, error, message",
    [
        ("ADAM", {"beta1": 1.0}, ValueError, r"beta1 must be a number in \[0, 1\), got 1.0"),
        ("LAMB", {"beta2": -0.5}, ValueError, r"beta2 must be a number in \[0, 1\), got -0.5"),
        ("LARS_SGD", {"momentum": 1.5}, ValueError, r"momentum must be a number in \[0, 1\), got 1.5"),
        ("LARS_SGD", {"eta": -1.0}, ValueError, "eta must be a finite number >= 0, got -1.0"),
        ("NONE", {"learning_rate": -1.0}, ValueError, "learning_rate must be a finite number >= 0, got -1.0"),
        (
            "EXACT_SGD",
            {"gradient_clipping": True, "max_gradient": 0.0},
            ValueError,
            "max_gradient must be > 0 with gradient_clipping, got 0.0",
        ),
        (
            "EXACT_ADAGRAD",
            {"initial_accumulator_value": -1.0},
            ValueError,
            "initial_accumulator_value must be a finite number >= 0, got -1.0",
        ),
        (
            "ADAM",
            {"initial_accumulator_value": 1.0},
            ValueError,
            "initial_accumulator_value must be 0 with optimizer ADAM, got 1.0",
        ),
        (
            "LAMB",
            {"optimizer_state_dtypes": {"momentum1": SparseType.BF16}},
            NotImplementedError,
            r"optimizer_state_dtypes\['momentum1'\]=BF16 is not supported with optimizer LAMB, expected FP32",
        ),
        (
            "ADAM",
            {"optimizer_state_dtypes": {"momentum1": SparseType.FP16}},
            NotImplementedError,
            r"optimizer_state_dtypes\['momentum1'\]=FP16 .* expected FP32 or BF16",
        ),
        (
            "ADAM",
            {"optimizer_state_dtypes": {"exp_avg": SparseType.FP32}},
            ValueError,
            "optimizer_state_dtypes must have names of momentum1, momentum2, got 'exp_avg'",
        ),
        (
            "SHAMPOO",
            {},
            NotImplementedError,
            "optimizer=SHAMPOO is not supported, expected one of EXACT_SGD, LARS_SGD, .*, NONE",
        ),
        (
            "EXACT_SGD",
            {"weight_decay_mode": WeightDecayMode.COUNTER},
            NotImplementedError,
            "weight_decay_mode=COUNTER is not supported, expected one of NONE, L2, DECOUPLE",
        ),
    ],
)
def test_refused(optimizer, options, error, message):
    with pytest.raises(error, match=message):
        build(fbtriton, optimizer=OptimType[optimizer], **options)


# Setters


@pytest.mark.parametrize("name", TRAINED)
def test_numbers_are_set_as_if_they_were_given(name):
    """update_hyper_parameters, for the steps that follow; what the optimizer lacks is kept and has no effect."""
    new = {"lr": 0.125, "eps": 0.25, "beta1": 0.75, "beta2": 0.875, "weight_decay": 0.25}
    given = new | {"learning_rate": new["lr"]}
    del given["lr"]
    mode = {"weight_decay_mode": WeightDecayMode.DECOUPLE} if name == "EXACT_ROWWISE_ADAGRAD" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, plain = (build(fbtriton, optimizer=OptimType[name], **mode, **more) for more in (given, {}))
    tbe = copy.deepcopy(plain)
    tbe.update_hyper_parameters(new)
    assert tbe.bags.optimizer == expected.bags.optimizer and tbe.optimizer_args == expected.optimizer_args
    assert tbe.get_learning_rate() == 0.125
    for module in (tbe, expected, plain):
        train(module)
    assert_same_tables(tbe, expected)
    assert not torch.equal(tbe.bags.weights, plain.bags.weights)


def test_an_error_changes_nothing():
    tbe = build(fbtriton, optimizer=OptimType.ADAM)
    before = tbe.bags.optimizer, tbe.optimizer_args, tbe.bags.hyperparameters.tolist(), tbe.get_learning_rate()
    for params in ({"lr": 0.5, "beta1": 1.0}, {"beta1": 0.5, "lr": -1.0}):
        with pytest.raises(ValueError, match="got"):
            tbe.update_hyper_parameters(params)
    assert before == (
        tbe.bags.optimizer,
        tbe.optimizer_args,
        tbe.bags.hyperparameters.tolist(),
        tbe.get_learning_rate(),
    )


@pytest.mark.parametrize("name", COUNTING)
def test_steps(name):
    """`iter` counts forwards with gradients on; what is set, also after the first forward, is what is used."""
    tbe, other = (build(fbtriton, optimizer=OptimType[name]) for _ in range(2))
    train(tbe, 2), train(other, 2)
    with torch.no_grad():
        tbe(torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1]))
    assert tbe.iter.tolist() == [2]
    tbe.set_optimizer_step(100)
    assert tbe.iter.tolist() == tbe.bags.iter.tolist() == [100] and tbe.bags.seed_and_step[1] == 2
    other.bags.iter.fill_(100)
    train(tbe, 1), train(other, 1)
    assert tbe.iter.tolist() == [101]
    assert_same_tables(tbe, other)
    for step in (-1, 0.5):
        with pytest.raises(ValueError, match=f"step must be an integer >= 0, got {step}"):
            tbe.set_optimizer_step(step)


def test_step_of_stochastic_rounding():
    tbe = build(fbtriton)
    train(tbe, 2)
    assert tbe.iter.tolist() == [2]
    tbe.set_optimizer_step(7)
    assert tbe.bags.seed_and_step[1] == 7


# NONE


def test_none_gives_a_sparse_gradient(any_device):
    """The rows' gradients, which an optimizer of PyTorch then takes; SGD does what EXACT_SGD does."""
    place = HOST if any_device.type == "cpu" else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    modules = [
        build(fbtriton, optimizer=kind, embedding_specs=[(*table, *place) for table in TABLES], device=any_device)
        for kind in (OptimType.NONE, OptimType.NONE, OptimType.EXACT_SGD)
    ]
    known, unknown, expected = modules
    ids = torch.tensor([3, 3, 1, 0, 4, 2], device=any_device)
    offsets = torch.tensor([0, 2, 3, 5, 6], device=any_device)
    before = known.bags.weights.clone()
    for module in modules:
        total = 6 if module is known else None  # rows 3 and 1 of table 0, 0 and 4 of table 1, 2 of table 2: and 1 more
        module(ids, offsets, total_unique_indices=total).square().sum().backward()
    assert torch.equal(known.bags.weights, before)
    weights = known.weights_host if any_device.type == "cpu" else known.weights_dev
    assert weights is known.bags.weights and weights.grad.is_sparse and weights.grad._nnz() == 6
    assert unknown.bags.weights.grad._nnz() == 5
    assert torch.equal(weights.grad.to_dense(), unknown.bags.weights.grad.to_dense())
    torch.optim.SGD(known.parameters(), lr=0.1).step()
    for view, other in zip(known.split_embedding_weights(), expected.split_embedding_weights(), strict=True):
        torch.testing.assert_close(view.detach(), other)


REFUSED_BY_NONE = {
    "set_learning_rate": (0.5,), "update_hyper_parameters": ({"lr": 0.5},), "set_optimizer_step": (3,),
    "split_optimizer_states": (), "get_optimizer_state": (), "get_optimizer_buffer": ("weights_dev",),
}  # fmt: skip


@pytest.mark.parametrize("method", REFUSED_BY_NONE)
def test_none_has_nothing_to_set(method):
    with pytest.raises(NotImplementedError, match="is not supported with optimizer NONE"):
        getattr(build(fbtriton, optimizer=OptimType.NONE), method)(*REFUSED_BY_NONE[method])


@pytest.mark.parity
@pytest.mark.parametrize("method", REFUSED_BY_NONE)
def test_fbgemms_none_has_nothing_to_set(method, fbgemm):
    theirs = build_like_cuda(fbgemm, optimizer=fbgemm.OptimType.NONE)
    error = AttributeError if method == "set_optimizer_step" else NotImplementedError  # it has no `iter` to log
    with pytest.raises(error):
        getattr(theirs, method)(*REFUSED_BY_NONE[method])


# state_dict


def fill(tbe, seed):
    """Other numbers in every table and state; a step where there is a count."""
    generator = torch.Generator().manual_seed(seed)
    states = [] if tbe.optimizer.name == "NONE" else tbe.split_optimizer_states()
    for views in [tbe.split_embedding_weights(), *states]:
        for view in views:
            view.detach().copy_(torch.rand(view.shape, generator=generator))
    if tbe.optimizer.name in COUNTING:
        tbe.iter.fill_(seed)


def tensors(tbe):
    states = [] if tbe.optimizer.name == "NONE" else tbe.split_optimizer_states()
    step = [tbe.iter] if tbe.optimizer.name in COUNTING else []
    return [*(tensor.detach() for views in [tbe.split_embedding_weights(), *states] for tensor in views), *step]


@pytest.mark.parity
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_loads_both_ways(name, fbgemm):
    """FBGEMM's keys, shapes and dtypes, and its states by name."""
    theirs, ours = (build_like_cuda(library, optimizer=library.OptimType[name]) for library in (fbgemm, fbtriton))
    state, other = fbgemm_state(theirs), ours.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in state.items()} == {k: (v.shape, v.dtype) for k, v in other.items()}
    if name not in ("NONE", "LARS_SGD"):
        keys = [[(key, value.shape) for key, value in table.items()] for table in theirs.get_optimizer_state()]
        assert keys == [[(key, value.shape) for key, value in table.items()] for table in ours.get_optimizer_state()]
    fill(theirs, 7)
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, tensors(ours), tensors(theirs)))
    fill(ours, 8)
    assert not any(map(torch.equal, tensors(ours), tensors(theirs)))
    load_into_fbgemm(theirs, ours.state_dict())
    assert len(tensors(ours)) == len(tensors(theirs)) and all(map(torch.equal, tensors(ours), tensors(theirs)))


@pytest.mark.parity
def test_state_dict_with_bf16_states_loads_both_ways(fbgemm):
    theirs, ours = (
        build_like_cuda(
            library, optimizer=library.OptimType.PARTIAL_ROWWISE_ADAM,
            optimizer_state_dtypes=dict.fromkeys(("momentum1", "momentum2"), library.SparseType.BF16),
        )
        for library in (fbgemm, fbtriton)
    )  # fmt: skip
    fill(theirs, 7)
    ours.load_state_dict(theirs.state_dict())
    assert ours.momentum2_dev.dtype == torch.bfloat16
    assert all(map(torch.equal, tensors(ours), tensors(theirs)))
    fill(ours, 8)
    load_into_fbgemm(theirs, ours.state_dict())
    assert all(map(torch.equal, tensors(ours), tensors(theirs)))


def test_buffers_that_only_fbgemm_1_6_saves_are_passed_over():
    tbe, other = (build(fbtriton, optimizer=OptimType.ADAM) for _ in range(2))
    train(tbe, 1)
    other.load_state_dict(tbe.state_dict() | {name: torch.zeros(0) for name in STREAMING})
    assert_same_tables(tbe, other)
    with pytest.raises(RuntimeError, match="Unexpected key.*res_other"):
        other.load_state_dict(tbe.state_dict() | {"res_other": torch.zeros(0)})


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_from_a_state_dict(name):
    tables = ((11, 3), (7, 8), (5, 1))  # padded
    tbe, other = (build(fbtriton, tables=tables, optimizer=OptimType[name]) for _ in range(2))
    train(tbe, 2)
    other.load_state_dict(tbe.state_dict())
    assert_same_tables(tbe, other)
    train(tbe, 2), train(other, 2)
    assert_same_tables(tbe, other)
    assert tbe.iter.tolist() == other.iter.tolist() == [4]


def test_a_wrong_iteration_is_refused():
    tbe = build(fbtriton, optimizer=OptimType.ADAM)
    state = tbe.state_dict() | {"iter": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=r"size mismatch for iter: expected one number, got \[2\]"):
        tbe.load_state_dict(state)
    del state["iter"]
    with pytest.raises(RuntimeError, match="Missing key.*iter"):
        tbe.load_state_dict(state)
