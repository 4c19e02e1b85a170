"""Every optimizer: the kernels against the reference, and what all must keep.

Formulas: test_optimizer_formulas.py. FBGEMM's optimizers are compared in test_parity.py.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from test_operator import Case, check, tables_of, vbe_case

from fbtriton import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    LarsSGD,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
    Table,
    TableBatchedEmbeddingBags,
)
from fbtriton.optim import KINDS, OPTIMIZERS, make_stamp, read_stamp
from fbtriton.testing import make_batch, run_step

# With a large eps or accumulator the error of a sum is not divided by the sum itself: see SMOOTH in test_operator.
DECAY = {"weight_decay": 0.25}
EVERY = [
    SGD(0.5),
    LarsSGD(0.5, eta=0.5, **DECAY),
    Adagrad(0.5, initial_accumulator=0.125),
    RowwiseAdagrad(0.5, initial_accumulator=0.125),
    RowwiseAdagrad(0.5, initial_accumulator=0.125, max_norm=1.0),
    RowwiseAdagrad(0.5, initial_accumulator=0.125, weight_decay_mode="l2", **DECAY),
    RowwiseAdagrad(0.5, initial_accumulator=0.125, weight_decay_mode="l2", max_norm=1.0, **DECAY),
    RowwiseAdagrad(0.5, initial_accumulator=0.125, weight_decay_mode="decoupled", **DECAY),
    RowwiseAdagrad(0.5, initial_accumulator=0.125, weight_decay_mode="decoupled", max_norm=1.0, **DECAY),
    Adam(0.25, eps=0.125, **DECAY),
    PartialRowwiseAdam(0.25, eps=0.125, **DECAY),
    Lamb(0.25, eps=0.125, **DECAY),
    PartialRowwiseLamb(0.25, eps=0.125, **DECAY),
]
BFLOAT16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
IN_BFLOAT16 = [Adam(0.25, eps=0.125, **BFLOAT16), PartialRowwiseAdam(0.25, eps=0.125, **BFLOAT16)]
by_variant = pytest.mark.parametrize("optimizer", EVERY, ids=lambda optimizer: optimizer.variant)


def test_every_variant_is_tested():
    """tests/test_row_gradients.py has the one that changes nothing."""
    assert [*(optimizer.variant for optimizer in EVERY), "none"] == list(OPTIMIZERS)


def module_of(optimizer, device="cpu", rows=6, dim=5, **options):
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags([Table(rows, dim)], optimizer=optimizer, device=device, **options)
    return module.init_uniform_(-1, 1)


def every_row(module):
    """Ids and offsets of bags that look up each row once."""
    rows, device = module.tables[0].rows, module.weights.device
    return torch.arange(rows, device=device), torch.arange(rows + 1, device=device)


# Kernels against the reference


CASES = {
    "fp32": Case(
        rows=(20, 9, 4), dims=(1, 4, 5), feature_tables=(0, 1, 2), lengths=((3, 2), (45, 1), (0, 4)), hot=0.5, steps=3
    ),
    "fp16": Case(
        rows=(9, 5),
        dims=(20, 12),
        lengths=((44, 0), (3, 1)),
        hot=0.9,
        weights_dtype=torch.float16,
        pooling="mean",
        steps=2,
    ),
    "vbe": vbe_case(weighted=True, sample_grad=True, pooling="mean", pruned=0.1, padding=2, steps=3),
}


@pytest.mark.interpreter
@by_variant
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels(optimizer, case, device):
    """Steps with runs of every kind; rows that are not looked up, and their states, stay as they are."""
    check(replace(case, optimizer=optimizer), device)


@pytest.mark.interpreter
@pytest.mark.parametrize("optimizer", IN_BFLOAT16, ids=lambda optimizer: optimizer.variant)
def test_kernels_with_bf16_states(optimizer, device):
    check(replace(CASES["fp32"], optimizer=optimizer), device)


@pytest.mark.parametrize("iteration", [0, 1, 10, 10**6, 2**33])
def test_bias_corrections(iteration, any_device):
    module = module_of(Adam(0.1, beta1=0.9, beta2=0.999), any_device)
    module.iter.fill_(iteration)
    output = module(*every_row(module))
    stamp = output.grad_fn.saved_tensors[2]
    corrections = read_stamp(stamp)[2][-2:]
    assert module.iter.tolist() == [iteration + 1]
    for beta, correction in zip((0.9, 0.999), corrections, strict=True):
        exact = 1 - float(torch.tensor(beta)) ** (iteration + 1)
        assert abs(correction - exact) <= exact * 2.0**-24


# What every optimizer keeps


@by_variant
def test_bad_gradients_reach_only_their_rows(optimizer, any_device):
    clean, bad = module_of(optimizer, any_device), module_of(optimizer, any_device)
    for module, values in ((clean, (1.0, 1.0)), (bad, (math.nan, math.inf))):
        output = module(*every_row(module))
        grad = torch.ones_like(output)
        grad[1, 0], grad[4, 2] = values
        output.backward(grad)
    good = [0, 2, 3, 5]
    (expected,), (actual,) = tables_of(clean), tables_of(bad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours[good], theirs[good])
    assert not bool(torch.isfinite(actual[0][1, 0])) and not bool(torch.isfinite(actual[0][4, 2]))


@by_variant
def test_numbers_of_the_forward_are_used(optimizer, any_device):
    """Learning rate, iteration and every other hyperparameter: what is set after the forward is for the next one."""
    plain, changed = module_of(optimizer, any_device), module_of(optimizer, any_device)
    for module in (plain, changed):
        output = module(*every_row(module))
        if module is changed:
            for name in optimizer.hyperparameter_names:
                module.set_hyperparameter(name, 0.0625)
            with torch.no_grad():
                module(*every_row(module))
        (output.square().sum() / 2).backward()
    assert torch.equal(plain.weights, changed.weights)
    for module in (plain, changed):
        (module(*every_row(module)).square().sum() / 2).backward()
    assert not torch.equal(plain.weights, changed.weights)
    assert changed.learning_rate == 0.0625


@by_variant
def test_state_dict_continues_training(optimizer):
    """Tables with padding between them; states are saved without it, like weights."""

    def make():
        tables = [Table(5, 3), Table(7, 8), Table(4, 1)]
        torch.manual_seed(0)
        return TableBatchedEmbeddingBags(tables, optimizer=optimizer, device="cpu").init_uniform_(-1, 1)

    def train(module, seed):
        batch = make_batch([5, 7, 4], [torch.tensor([3, 1])] * 3, seed=seed)
        return run_step(module, batch, torch.rand(2, 12, generator=torch.Generator().manual_seed(seed)))

    first, second = make(), make()
    train(first, 0)
    saved = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    for state in optimizer.states:
        assert saved[state.name].numel() == (16 if state.rowwise else 5 * 3 + 7 * 8 + 4)
    assert second.load_state_dict(saved).missing_keys == []
    train(first, 1)
    train(second, 1)
    for ours, theirs in zip(tables_of(first), tables_of(second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@by_variant
def test_names_and_shapes_of_states(optimizer):
    """The names of FBGEMM's `get_optimizer_state`, and LARS's momentum, which has none there."""
    names = {
        SGD: [], LarsSGD: ["momentum"], Adagrad: ["sum"], RowwiseAdagrad: ["sum"],
        Adam: ["exp_avg", "exp_avg_sq"], PartialRowwiseAdam: ["exp_avg", "exp_avg_sq"],
        Lamb: ["exp_avg", "exp_avg_sq"], PartialRowwiseLamb: ["exp_avg", "exp_avg_sq"],
    }  # fmt: skip
    module = module_of(optimizer)
    assert [state.name for state in optimizer.states] == names[type(optimizer)]
    (views,) = module.split_optimizer_states()
    shapes = [(6,) if state.rowwise else (6, 5) for state in optimizer.states]
    assert [tuple(view.shape) for view in views] == shapes
    assert ("iter" in module.state_dict()) == optimizer.counts_iterations


# Counting


@pytest.mark.parametrize("kind", [Adam, PartialRowwiseAdam, Lamb, PartialRowwiseLamb], ids=lambda kind: kind.name)
def test_iterations_are_forwards_with_gradients(kind, any_device):
    module = module_of(kind(0.1), any_device)
    ids, offsets = every_row(module)
    first, second = module(ids, offsets), module(ids, offsets)
    assert module.iter.tolist() == [2]
    (first.sum() + second.sum()).backward()
    with torch.no_grad():
        module(ids, offsets)
    module.requires_grad_(False)
    module(ids, offsets)
    assert module.iter.tolist() == [2]
    module.requires_grad_(True)
    empty = torch.zeros(0, dtype=torch.int64, device=any_device)
    module(empty, empty.new_zeros(1))  # no samples
    module(empty, empty.new_zeros(3))  # no ids
    assert module.iter.tolist() == [4]


def test_iterations_are_counted_when_compiled(any_device):
    eager, compiled = module_of(Adam(0.1), any_device), module_of(Adam(0.1), any_device)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for module in (eager, compiled):
        for _ in range(3):
            (call if module is compiled else module)(*every_row(module)).square().sum().backward()
    assert eager.iter.tolist() == compiled.iter.tolist() == [3]
    assert torch.equal(eager.weights, compiled.weights)


def test_iteration_in_the_stamp_of_pytorch():
    hyperparameters, iteration = torch.tensor([0.1, 0.5, 0.25, 0.0, 0.0]), torch.tensor([1])
    stamp = make_stamp(hyperparameters, torch.tensor([7, 3]), iteration)
    assert read_stamp(stamp) == (3, 7, [*hyperparameters.tolist(), 0.75, 0.9375])
    assert iteration.tolist() == [2]


# Clipping


@by_variant
def test_gradients_are_clipped_first(optimizer, any_device):
    """As if the caller had clipped them, the gradient of the per-sample weights included; a NaN stays one."""
    clipping = module_of(replace(optimizer, max_gradient=0.25), any_device)
    plain = module_of(optimizer, any_device)
    generator = torch.Generator().manual_seed(0)
    grad = (torch.rand(6, 5, generator=generator) * 2 - 1).to(any_device)
    grad[2, 0] = math.nan
    results = []
    for module in (clipping, plain):
        weights = torch.rand(6, generator=torch.Generator().manual_seed(1)).to(any_device).requires_grad_()
        module(*every_row(module), weights).backward(grad if module is clipping else grad.clamp(-0.25, 0.25))
        results.append([module.weights.nan_to_num(9.0), weights.grad.nan_to_num(9.0)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert bool((results[0][0] == 9.0).any())


# Messages


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Adam(0.1, beta1=1.0), "beta1 must be a number in [0, 1), got 1.0"),
        (lambda: Lamb(0.1, beta2=-0.5), "beta2 must be a number in [0, 1), got -0.5"),
        (lambda: LarsSGD(0.1, momentum=1.5), "momentum must be a number in [0, 1), got 1.5"),
        (lambda: Adagrad("0.1"), "lr must be a finite number >= 0, got '0.1'"),
        (lambda: SGD(0.1, max_gradient=-1.0), "max_gradient must be a finite number >= 0, got -1.0"),
        (lambda: Adam(0.1, exp_avg_dtype=torch.float16), "exp_avg_dtype must be torch.float32 or torch.bfloat16"),
        (
            lambda: RowwiseAdagrad(0.1, weight_decay_mode="L2"),
            "weight_decay_mode must be one of none, l2, decoupled, got 'L2'",
        ),
        (
            lambda: RowwiseAdagrad(0.1, weight_decay=0.1),
            'weight_decay must be 0 if weight_decay_mode is "none", got 0.1',
        ),
        (lambda: module_of(SGD(0.1)).set_hyperparameter("eps", 0.1), "name must be one of lr, got 'eps'"),
        (lambda: module_of(Adam(0.1)).set_hyperparameter("beta1", 2.0), "beta1 must be a number in [0, 1), got 2.0"),
    ],
)
def test_messages(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_an_optimizer_says_what_it_is():
    for kind in KINDS:
        assert kind.__doc__ and "FBGEMM" in kind.__doc__, kind
