"""Without an optimizer: the sparse gradient of the weights, against nn.EmbeddingBag and against SGD."""

import re

import pytest
import torch

from fbtriton import SGD, NoOptimizer, Table, TableBatchedEmbeddingBags
from fbtriton.testing import make_batch

ROWS, LENGTHS = (9, 5), [[3, 0, 40], [1, 4, 0]]


def make(device, optimizer=None, dim=5, **options):
    torch.manual_seed(0)
    tables = [Table(rows, dim) for rows in ROWS]
    module = TableBatchedEmbeddingBags(tables, optimizer=optimizer or NoOptimizer(), device=device, **options)
    return module.init_uniform_(-1, 1)


def batch_of(device, seed=0, **options):
    return make_batch(ROWS, torch.tensor(LENGTHS), seed=seed, hot=0.3, device=device, **options)


def gradient(device, dim=5, seed=0):
    return torch.rand(3, 2 * dim, generator=torch.Generator().manual_seed(seed)).to(device) * 2 - 1


def unique_rows(batch):
    """Of both tables, counted over all rows."""
    ids = batch.indices.cpu().split([sum(LENGTHS[0]), sum(LENGTHS[1])])
    return torch.cat([ids[0], ids[1] + ROWS[0]]).unique()


@pytest.mark.parametrize("pooling, weighted", [("sum", False), ("mean", False), ("sum", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_sgd_would_subtract(pooling, weighted, dtype, any_device):
    options = {"pooling": pooling, "weights_dtype": dtype}
    batch, grad = batch_of(any_device, weighted=weighted), gradient(any_device)
    module, trained = make(any_device, **options), make(any_device, SGD(1.0), pooling=pooling)
    trained.weights.zero_()
    before = module.weights.detach().clone()
    for other in (module, trained):
        other(batch.indices, batch.offsets, batch.sample_weights).backward(grad)
    sparse = module.weights.grad
    assert sparse.is_sparse and sparse.dtype == dtype
    assert sparse.shape == module.weights.shape == (14, 5)
    assert torch.equal(sparse._indices()[0].cpu(), unique_rows(batch))
    expected = -torch.cat(trained.split_embedding_weights())
    # each side sums up to 13 gradients in fp32 and rounds once
    torch.testing.assert_close(sparse.to_dense(), expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(module.weights, before)


def test_embedding_bag_and_sparse_optimizers(any_device):
    """Ten steps of torch.optim.SparseAdam."""
    module = make(any_device)
    table = torch.nn.EmbeddingBag.from_pretrained(
        module.weights.detach().cpu().clone(), freeze=False, mode="sum", include_last_offset=True, sparse=True
    )
    ours = torch.optim.SparseAdam([module.weights], lr=0.1, eps=0.25)
    theirs = torch.optim.SparseAdam(table.parameters(), lr=0.1, eps=0.25)
    for seed in range(10):
        batch, grad = batch_of(any_device, seed), gradient(any_device, seed=seed)
        ours.zero_grad()
        theirs.zero_grad()
        output = module(batch.indices, batch.offsets)
        output.backward(grad)
        ids, offsets = batch.indices.cpu().clone(), batch.offsets.cpu()
        ids[sum(LENGTHS[0]) :] += ROWS[0]
        looked_up = table(ids, offsets).view(2, 3, 5).permute(1, 0, 2).reshape(3, 10)
        looked_up.backward(grad.cpu())
        torch.testing.assert_close(output.cpu(), looked_up)
        ours.step()
        theirs.step()
    torch.testing.assert_close(module.weights.detach().cpu(), table.weight.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("more", [0, 3])
def test_known_number_of_rows(more, any_device):
    """Nothing waits for the device; a number that is too large adds zeros to a row that is there."""
    batch, grad = batch_of(any_device), gradient(any_device)
    module, other = make(any_device), make(any_device)
    known = unique_rows(batch).numel() + more
    module(batch.indices, batch.offsets, total_unique_indices=known).backward(grad)
    other(batch.indices, batch.offsets).backward(grad)
    sparse, expected = module.weights.grad, other.weights.grad.coalesce()
    assert sparse._nnz() == min(known, sum(ROWS))
    assert torch.equal(sparse.coalesce().indices(), expected.indices())
    assert torch.equal(sparse.coalesce().values(), expected.values())


def test_gradients_accumulate(any_device):
    module = make(any_device)
    for seed in range(2):
        batch = batch_of(any_device, seed)
        module(batch.indices, batch.offsets).backward(gradient(any_device, seed=seed))
    total = module.weights.grad.to_dense()
    for seed in range(2):
        other, batch = make(any_device), batch_of(any_device, seed)
        other(batch.indices, batch.offsets).backward(gradient(any_device, seed=seed))
        total = total - other.weights.grad.to_dense()
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-5)


def test_nothing_looked_up(any_device):
    module = make(any_device)
    empty = torch.zeros(0, dtype=torch.int64, device=any_device)
    module(empty, torch.zeros(7, dtype=torch.int64, device=any_device)).sum().backward()
    assert module.weights.grad._nnz() == 0
    pruned = torch.full((2,), -1, device=any_device)
    module(pruned, torch.tensor([0, 2, 2], device=any_device), total_unique_indices=2).sum().backward()
    assert bool((module.weights.grad._indices() == 0).all()), "rows that are there"
    assert not module.weights.grad.to_dense().any()


def test_gradient_of_sample_weights(any_device):
    """Beside that of the weights, and alone if those are frozen."""
    batch, grad = batch_of(any_device, weighted=True), gradient(any_device)
    grads = []
    for optimizer, frozen in ((None, False), (None, True), (SGD(1.0), False)):
        module = make(any_device, optimizer).requires_grad_(not frozen)
        weights = batch.sample_weights.clone().requires_grad_()
        module(batch.indices, batch.offsets, weights).backward(grad)
        grads.append(weights.grad)
        assert not frozen or module.weights.grad is None
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_clipping(any_device):
    module, other = make(any_device, NoOptimizer(max_gradient=0.25)), make(any_device)
    batch, grad = batch_of(any_device), gradient(any_device)
    module(batch.indices, batch.offsets).backward(grad)
    other(batch.indices, batch.offsets).backward(grad.clamp(-0.25, 0.25))
    assert torch.equal(module.weights.grad.to_dense(), other.weights.grad.to_dense())


def test_batch_sizes(any_device):
    module, other = make(any_device), make(any_device)
    batch, grad = batch_of(any_device), gradient(any_device)
    module(batch.indices, batch.offsets, batch_sizes=[[3], [3]]).backward(
        grad.view(3, 2, 5).permute(1, 0, 2).reshape(-1)
    )
    other(batch.indices, batch.offsets).backward(grad)
    assert torch.equal(module.weights.grad.to_dense(), other.weights.grad.to_dense())


def test_as_a_module():
    """One parameter, which is what state_dict holds; tables lie back to back, and views write into it."""
    module = make("cpu", dim=3, weights_dtype=torch.float16)
    assert [name for name, _ in module.named_parameters()] == ["weights"]
    assert module.weights.shape == (14, 3)
    views = module.split_embedding_weights()
    views[1].fill_(2.0)
    assert bool((module.weights[9:] == 2.0).all())
    other = make("cpu", dim=3, weights_dtype=torch.float16)
    assert list(module.state_dict()) == ["weights", "hyperparameters", "seed_and_step"]
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weights, module.weights)


@pytest.mark.parametrize(
    "act, message",
    [
        (
            lambda: TableBatchedEmbeddingBags([Table(3, 4), Table(3, 8)], optimizer=NoOptimizer(), device="cpu"),
            "tables must have one dim with NoOptimizer, got [4, 8]",
        ),
        (lambda: make("cpu").learning_rate, "learning_rate needs an optimizer that has one, got NoOptimizer"),
        (lambda: setattr(make("cpu"), "learning_rate", 0.1), "learning_rate needs an optimizer that has one"),
        (
            lambda: make("cpu")(torch.tensor([1]), torch.tensor([0, 1, 1]), total_unique_indices=2),
            "total_unique_indices must be in [0, 1], the number of indices, got 2",
        ),
        (
            lambda: make("cpu", SGD(0.1))(torch.tensor([1]), torch.tensor([0, 1, 1]), total_unique_indices=1),
            "total_unique_indices must be None with an optimizer, got 1",
        ),
    ],
)
def test_messages(act, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        act()


def test_compiling_is_refused():
    with pytest.raises(Exception, match="which torch.compile does not take"):
        torch.compile(make("cpu"), fullgraph=True, backend="eager")(torch.tensor([1]), torch.tensor([0, 1, 1]))
