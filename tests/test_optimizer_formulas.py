"""The formulas of the optimizers against torch.optim, whose optimizers see a table as one parameter, and against each
other."""

import pytest
import torch
from test_optimizers import every_row, module_of

from fbtriton import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    LarsSGD,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
)


def tensor_of(module):
    return torch.nn.Parameter(module.split_embedding_weights()[0].double())


def compare(module, parameter, step, num_steps=5):
    """Train both on the same gradients, which every row gets; step(parameter) does the other side's update."""
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        grad = torch.rand(parameter.shape, generator=generator) * 2 - 1
        module(*every_row(module)).backward(grad)
        parameter.grad = grad.double()
        step(parameter)
    torch.testing.assert_close(module.split_embedding_weights()[0].double(), parameter.data, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (SGD(0.25), lambda p: torch.optim.SGD(p, lr=0.25)),
        (SGD(0.25, max_gradient=10.0), lambda p: torch.optim.SGD(p, lr=0.25)),
        (
            Adagrad(0.25, eps=0.25, initial_accumulator=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.25, eps=0.25, initial_accumulator_value=0.5),
        ),
        (
            Adam(0.25, 0.875, 0.75, eps=0.25, weight_decay=0.5),
            lambda p: torch.optim.AdamW(p, lr=0.25, betas=(0.875, 0.75), eps=0.25, weight_decay=0.5),
        ),
    ],
    ids=["sgd", "sgd within max_gradient", "adagrad", "adam"],
)
def test_torch_optim(ours, theirs):
    module = module_of(ours)
    parameter = tensor_of(module)
    optimizer = theirs([parameter])
    compare(module, parameter, lambda _: optimizer.step())


@pytest.mark.parametrize(
    "rowwise, elementwise",
    [
        (RowwiseAdagrad(0.25, eps=0.5), lambda p: torch.optim.Adagrad(p, lr=0.25, eps=0.5)),
        (
            RowwiseAdagrad(0.25, eps=0.5, weight_decay=0.5, weight_decay_mode="l2"),
            lambda p: torch.optim.Adagrad(p, lr=0.25, eps=0.5, weight_decay=0.5),
        ),
        (
            PartialRowwiseAdam(0.25, 0.875, 0.75, eps=0.25, weight_decay=0.5),
            lambda p: torch.optim.AdamW(p, lr=0.25, betas=(0.875, 0.75), eps=0.25, weight_decay=0.5),
        ),
    ],
    ids=["rowwise_adagrad", "rowwise_adagrad_l2", "partial_rowwise_adam"],
)
def test_rows_of_one_element_do_what_torch_optim_does(rowwise, elementwise):
    """There a mean over the row is the element's own square."""
    module = module_of(rowwise, dim=1)
    parameter = tensor_of(module)
    optimizer = elementwise([parameter])
    compare(module, parameter, lambda _: optimizer.step())


@pytest.mark.parametrize(
    "rowwise, elementwise",
    [(RowwiseAdagrad, Adagrad), (PartialRowwiseAdam, Adam), (PartialRowwiseLamb, Lamb)],
    ids=["adagrad", "adam", "lamb"],
)
def test_equal_squares_make_rowwise_and_elementwise_the_same(rowwise, elementwise):
    """Gradients of one magnitude in a row: then the mean of the squares is each square."""
    modules = [module_of(kind(0.25, eps=0.25)) for kind in (rowwise, elementwise)]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        signs = torch.randint(0, 2, (6, 5), generator=generator) * 2.0 - 1
        grad = signs * torch.rand(6, 1, generator=generator)
        for module in modules:
            module(*every_row(module)).backward(grad)
    torch.testing.assert_close(modules[0].weights, modules[1].weights, rtol=0, atol=1e-6)


def test_decoupled_weight_decay_shrinks_rows_before_the_step():
    options = {"initial_accumulator": 0.5, "eps": 0.25}
    plain = module_of(RowwiseAdagrad(0.25, **options))
    decayed = module_of(RowwiseAdagrad(0.25, weight_decay=0.5, weight_decay_mode="decoupled", **options))
    plain.weights.mul_(1 - 0.25 * 0.5)
    for module in (plain, decayed):
        module(*every_row(module)).sum().backward()
    torch.testing.assert_close(plain.weights, decayed.weights)


def test_max_norm_shortens_only_rows_of_the_batch_that_are_longer(any_device):
    module = module_of(RowwiseAdagrad(0.0, max_norm=1.0), any_device, dim=2)
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [6.0, 8.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 2.0]])
    module.split_embedding_weights()[0].copy_(rows)
    ids, offsets = torch.tensor([0, 1, 3, 4, 5], device=any_device), torch.arange(6, device=any_device)
    module(ids, offsets).sum().backward()
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [6.0, 8.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(module.split_embedding_weights()[0].cpu(), expected)


def test_lamb_moves_a_row_by_its_length_along_adams_step():
    """After one step from the same weights."""
    adam, lamb = module_of(Adam(0.25, eps=0.25, weight_decay=0.5)), module_of(Lamb(0.25, eps=0.25, weight_decay=0.5))
    before = tensor_of(adam).data
    grad = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) - 0.5
    moves = []
    for module in (adam, lamb):
        module(*every_row(module)).backward(grad)
        moves.append(before - tensor_of(module).data)
    lengths = 0.25 * before.norm(dim=1)
    directions = moves[0] / moves[0].norm(dim=1, keepdim=True)
    torch.testing.assert_close(moves[1], directions * lengths[:, None], rtol=0, atol=1e-6)


def test_lars_is_sgd_with_momentum_on_scaled_gradients():
    module = module_of(LarsSGD(0.25, momentum=0.5, eta=0.125, weight_decay=0.5))
    parameter = tensor_of(module)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)

    def step(parameter):
        weight_norm, grad_norm = (tensor.norm(dim=1, keepdim=True) for tensor in (parameter.data, parameter.grad))
        rate = 0.25 * 0.125 * weight_norm / (grad_norm + 0.5 * weight_norm)
        parameter.grad = rate * (parameter.grad + 0.5 * parameter.data)
        optimizer.step()

    compare(module, parameter, step)


@pytest.mark.parametrize("optimizer", [Lamb(0.25), PartialRowwiseLamb(0.25), LarsSGD(0.25)], ids=lambda o: o.name)
def test_zeros_divide_nothing(optimizer, any_device):
    """No gradient and no weight decay, or a row of zeros: nothing moves, and nothing becomes NaN."""
    module = module_of(optimizer, any_device)
    before = module.weights.clone()
    (module(*every_row(module)) * 0.0).sum().backward()
    assert torch.equal(module.weights, before)
    module.weights.zero_()
    module(*every_row(module)).sum().backward()
    assert not module.weights.any()
