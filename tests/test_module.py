"""The module: construction, views, state_dict, learning rate, and what it is as an nn.Module."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags


def make(**options):
    torch.manual_seed(0)
    options = {"optimizer": RowwiseAdagrad(0.1), "device": "cpu"} | options
    tables = [Table(5, 3), Table(7, 8), Table(4, 1)]  # 15 and 4 elements: padded for every dtype
    return TableBatchedEmbeddingBags(tables, **options).init_uniform_(-1, 1)


def train(module, steps=2):
    device = module.weights.device
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        indices = torch.randint(0, 4, (9,), generator=generator).to(device)
        offsets = torch.tensor([0, 2, 3, 3, 6, 8, 9], device=device)
        module(indices, offsets).square().sum().backward()
    return module


def test_weights_start_at_zero_and_state_at_its_initial_value():
    module = TableBatchedEmbeddingBags(
        [Table(3, 2)], optimizer=RowwiseAdagrad(0.1, initial_accumulator=0.25), device="cpu"
    )
    assert torch.equal(module.weights, torch.zeros(8)[: module.weights.numel()])
    assert torch.equal(module.split_optimizer_states()[0][0], torch.full((3,), 0.25))


def test_views_share_memory():
    module = make()
    views = module.split_embedding_weights()
    assert [tuple(view.shape) for view in views] == [(5, 3), (7, 8), (4, 1)]
    views[1].fill_(4.0)
    assert int((module.weights == 4.0).sum()) == 56
    states = module.split_optimizer_states()
    assert [[tuple(state.shape) for state in table] for table in states] == [[(5,)], [(7,)], [(4,)]]
    states[2][0].fill_(9.0)
    assert int((module.sum == 9.0).sum()) == 4
    assert make(optimizer=SGD(0.1)).split_optimizer_states() == [[], [], []]


def test_init_uniform_fills_every_table():
    module = make().init_uniform_(2.0, 3.0)
    for view in module.split_embedding_weights():
        assert bool(((view >= 2) & (view < 3)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_state_dict_round_trip(dtype):
    module = train(make(weights_dtype=dtype))
    state = module.state_dict()
    assert list(state) == ["weights", "sum", "hyperparameters", "seed_and_step"]
    unpadded = torch.cat([view.flatten() for view in module.split_embedding_weights()])
    assert torch.equal(state["weights"], unpadded), "weights are saved without padding"
    other = make(weights_dtype=dtype, optimizer=RowwiseAdagrad(0.9))
    given = {name: tensor.clone() for name, tensor in state.items()}
    assert other.load_state_dict(given).missing_keys == []
    assert all(torch.equal(given[name], state[name]) for name in state), "the caller's dict was changed"
    assert other.learning_rate == pytest.approx(0.1)
    for a, b in zip(train(module).state_dict().items(), train(other).state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), "training goes on with the same bits"


def test_state_dict_inside_another_module():
    outer = torch.nn.ModuleDict({"tables": train(make()), "dense": torch.nn.Linear(2, 2)})
    copied = torch.nn.ModuleDict({"tables": make(), "dense": torch.nn.Linear(2, 2)})
    copied.load_state_dict(outer.state_dict())
    assert torch.equal(outer["tables"].weights, copied["tables"].weights)


def test_state_dict_of_other_tables_is_refused():
    state = make().state_dict()
    state["weights"] = state["weights"][:-1]
    with pytest.raises(RuntimeError, match="size mismatch for weights"):
        make().load_state_dict(state)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(copier):
    module = train(make())
    other = copier(module)
    before = module.weights.clone()
    train(other)
    assert torch.equal(module.weights, before)
    assert torch.equal(train(module).weights, other.weights)


def test_learning_rate_of_the_forward_is_used(any_device):
    indices, offsets = torch.tensor([0], device=any_device), torch.tensor([0, 1], device=any_device)
    module = TableBatchedEmbeddingBags([Table(1, 4)], optimizer=SGD(1.0), device=any_device)
    output = module(indices, offsets)
    module.learning_rate = 100.0
    output.sum().backward()
    assert torch.equal(module.weights.cpu(), torch.full((4,), -1.0))
    module(indices, offsets).sum().backward()
    assert torch.equal(module.weights.cpu(), torch.full((4,), -101.0))
    assert module.learning_rate == 100.0


def test_gradients_stay_inside(any_device):
    """The weights get no gradient of their own, and an output that nobody uses trains nothing."""
    module = make(device=any_device)
    before = module.weights.clone()
    indices, offsets = torch.tensor([1, 2, 3], device=any_device), torch.tensor([0, 1, 2, 3], device=any_device)
    output = module(indices, offsets)
    assert output.requires_grad and module.anchor.grad is None
    with torch.no_grad():
        assert not module(indices, offsets).requires_grad
    (output.sum() * 0).backward()
    assert torch.equal(module.weights, before)
    assert module.anchor.grad is None


def test_state_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        module = train(make(weights_dtype=torch.float16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (module.sum.dtype, module.hyperparameters.dtype) == (torch.float32, torch.float32)


def test_seed_follows_torch():
    torch.manual_seed(11)
    first = TableBatchedEmbeddingBags([Table(1, 1)], optimizer=SGD(0.1), device="cpu")
    assert first.seed_and_step.tolist() == [11, 0]


def test_imports_without_triton():
    """On a system without Triton CPU tensors still work."""
    script = """
import sys
sys.modules["triton"] = None
import torch, fbtriton
module = fbtriton.TableBatchedEmbeddingBags([fbtriton.Table(3, 2)], optimizer=fbtriton.SGD(1.0), device="cpu")
module(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
assert module.weights.tolist()[:6] == [0, 0, -1, -1, 0, 0]
from fbtriton.tlx import available
assert not available()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_imports_neither_fbgemm_nor_torchrec():
    script = (
        "import sys, fbtriton; assert not {'fbgemm_gpu', 'torchrec'} & {name.split('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_batch_sizes_give_the_rows_of_separate_calls(any_device):
    """Each rank's part of the output is what its samples give on their own, feature by feature."""
    module = make(device=any_device)
    batch_sizes = [[2, 1], [1, 0], [0, 2]]
    lengths = torch.tensor([3, 0, 2, 4, 1, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.arange(12) % 4
    output = module(indices.to(any_device), offsets.to(any_device), batch_sizes=batch_sizes).cpu()
    tables = [view.cpu() for view in module.split_embedding_weights()]
    bags = [indices[begin:end] for begin, end in zip(offsets, offsets[1:], strict=False)]
    first = [0, 3, 4]
    expected = []
    for rank in range(2):
        for feature, table in enumerate(tables):
            start = first[feature] + sum(batch_sizes[feature][:rank])
            expected += [table[ids].sum(dim=0) for ids in bags[start : start + batch_sizes[feature][rank]]]
    torch.testing.assert_close(output, torch.cat(expected))
