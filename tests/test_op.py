"""The op's declaration: orders of forward and backward, eager and compiled, and what PyTorch's own checks say."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fbtriton.functional
from fbtriton import SGD, Adam, RowwiseAdagrad, Table, TableBatchedEmbeddingBags

EAGER_AND_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def make(device, compiled=False, optimizer=None, **options):
    torch.manual_seed(0)
    torch._dynamo.reset()
    tables = [Table(10, 4), Table(6, 8)]
    module = TableBatchedEmbeddingBags(tables, optimizer=optimizer or SGD(0.5), device=device, **options)
    module.init_uniform_(-1, 1)
    return module, torch.compile(module, fullgraph=True) if compiled else module


def batch(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 6, (8,), generator=generator)
    return indices.to(device), torch.tensor([0, 2, 3, 6, 8], device=device)


def expected_sgd(module, batches, rates, scale=1.0):
    """Weights after SGD steps with a gradient of `scale`, all forwards first."""
    tables = [view.clone().double() for view in module.split_embedding_weights()]
    for (indices, offsets), rate in zip(batches, rates, strict=True):
        for feature, table in enumerate(tables):
            begin, end = int(offsets[2 * feature]), int(offsets[2 * feature + 2])
            for row in indices[begin:end].tolist():
                table[row] -= rate * scale
    return tables


def assert_tables(module, expected):
    for view, table in zip(module.split_embedding_weights(), expected, strict=True):
        torch.testing.assert_close(view.double(), table, rtol=0, atol=1e-5)


@EAGER_AND_COMPILED
def test_two_forwards_then_one_backward(compiled, any_device):
    module, call = make(any_device, compiled)
    batches = [batch(any_device, 1), batch(any_device, 2)]
    expected = expected_sgd(module, batches, [0.5, 0.5])
    (call(*batches[0]).sum() + call(*batches[1]).sum()).backward()
    assert_tables(module, expected)


@EAGER_AND_COMPILED
def test_forward_forward_backward_backward_with_a_new_rate_between(compiled, any_device):
    module, call = make(any_device, compiled)
    batches = [batch(any_device, 1), batch(any_device, 2)]
    expected = expected_sgd(module, batches, [0.5, 0.25])
    first = call(*batches[0])
    module.learning_rate = 0.25
    second = call(*batches[1])
    module.learning_rate = 7.0
    first.sum().backward()
    second.sum().backward()
    assert_tables(module, expected)
    assert module.seed_and_step[1] == 2


@EAGER_AND_COMPILED
def test_activation_checkpointing(compiled, any_device):
    module, call = make(any_device, compiled)
    indices, offsets = batch(any_device)
    expected = expected_sgd(module, [(indices, offsets)], [0.5], scale=2.0)
    checkpoint(lambda: (call(indices, offsets) * 2).sum(), use_reentrant=False).backward()
    assert_tables(module, expected)


@EAGER_AND_COMPILED
def test_weighted_training_steps(compiled, any_device):
    """Compiled and eager train to the same bits, with gradients of the per-sample weights."""
    results = []
    for use in (False, compiled):
        module, call = make(any_device, use, RowwiseAdagrad(0.1), pooling="mean", weights_dtype=torch.float16)
        grads = []
        for step in range(3):
            weights = torch.rand(8, generator=torch.Generator().manual_seed(step)).to(any_device).requires_grad_()
            call(*batch(any_device, step), weights).square().sum().backward()
            grads.append(weights.grad)
        results.append([module.weights, module.sum, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3 if a.dtype == torch.float16 else 1e-5, atol=1e-6)


def test_learning_rate_does_not_recompile(any_device):
    module, call = make(any_device, compiled=True)
    call(*batch(any_device)).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rate in (0.1, 0.2, 0.3):
            module.learning_rate = rate
            call(*batch(any_device)).sum().backward()


def test_compiled_with_changing_sizes(any_device):
    """Numbers of ids and samples change from step to step."""
    module, call = make(any_device, compiled=True)
    for batch_size in (2, 3, 5):
        offsets = torch.arange(0, 2 * batch_size + 1, device=any_device) * 2
        indices = torch.arange(int(offsets[-1]), device=any_device) % 6
        eager = module(indices, offsets)
        torch.testing.assert_close(call(indices, offsets), eager)


def test_gradient_of_sample_weights_only_when_needed(any_device, monkeypatch):
    asked = []
    real = fbtriton.functional.backward
    monkeypatch.setattr(
        fbtriton.functional,
        "backward",
        lambda **arguments: asked.append(arguments["needs_sample_weights_grad"]) or real(**arguments),
    )
    module, call = make(any_device)
    for requires_grad in (False, True):
        weights = torch.rand(8, device=any_device, requires_grad=requires_grad)
        call(*batch(any_device), weights).sum().backward()
    assert asked == [False, True]


def test_frozen_tables_are_not_trained(any_device):
    """The gradient of the per-sample weights goes on; weights and step stay."""
    module, _ = make(any_device)
    module.requires_grad_(False)
    weights = torch.rand(8, device=any_device, requires_grad=True)
    before = module.weights.clone()
    module(*batch(any_device), weights).sum().backward()
    assert torch.equal(module.weights, before) and module.seed_and_step[1] == 0
    assert weights.grad is not None and bool((weights.grad != 0).all())


def test_opcheck(any_device):
    module, _ = make(any_device)
    indices, offsets = batch(any_device)
    text = module.spec.text
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    report = module.bounds_check_report
    torch.library.opcheck(torch.ops.fbtriton.check_bounds, (indices, offsets, [], [], report, text), test_utils=tests)
    weights = torch.rand(8, device=any_device, requires_grad=True)
    for sample_weights, fused_report in ((None, None), (weights, report)):
        inputs = (module.anchor, module.weights, [], module.hyperparameters, module.seed_and_step, None)
        inputs = (*inputs, indices, offsets)
        torch.library.opcheck(
            torch.ops.fbtriton.embedding_bags, (*inputs, sample_weights, [], [], fused_report, text), test_utils=tests
        )
    with torch.no_grad():
        output, stamp, _, counts = torch.ops.fbtriton.embedding_bags(*inputs, None, [], [], None, text)
    saved = (module.seed_and_step, stamp, counts, indices, offsets)
    for sample_weights, needed in ((None, False), (weights.detach(), True)):
        torch.library.opcheck(
            torch.ops.fbtriton.embedding_bags_backward,
            (torch.ones_like(output), module.weights, [], *saved, sample_weights, [], [], True, needed, text),
            test_utils=tests,
        )


def test_opcheck_with_iterations(any_device):
    """The forward writes the count, and says so."""
    module, _ = make(any_device, optimizer=Adam(0.1))
    inputs = (module.anchor, module.weights, [module.exp_avg, module.exp_avg_sq], module.hyperparameters)
    inputs = (*inputs, module.seed_and_step, module.iter, *batch(any_device), None, [], [], None, module.spec.text)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fbtriton.embedding_bags, inputs, test_utils=tests)


@EAGER_AND_COMPILED
def test_batch_sizes(compiled, any_device):
    module, call = make(any_device, compiled)
    sizes = [[1, 2], [1, 0]]
    indices = torch.tensor([0, 1, 2, 3, 4], device=any_device)
    offsets = torch.tensor([0, 1, 3, 4, 5], device=any_device)
    expected = [view.clone().double() for view in module.split_embedding_weights()]
    expected[0][[0, 1, 2, 3]] -= 0.5
    expected[1][4] -= 0.5
    output = call(indices, offsets, batch_sizes=sizes)
    assert output.shape == (3 * 4 + 8,)
    output.sum().backward()
    assert_tables(module, expected)
