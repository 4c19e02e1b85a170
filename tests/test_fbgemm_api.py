"""FBGEMM's class on top of ours: what it computes and keeps. Argument by argument: test_migration.py."""

import copy
import pickle

import pytest
import torch
from migration_cases import fbgemm_state, load_into_fbgemm

import fbtriton
from fbtriton import ComputeDevice, EmbeddingLocation, OptimType, SparseType
from fbtriton.testing import assert_close, make_batch

HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)
CUDA = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
TABLES = ((11, 4), (7, 8), (5, 12))
FEATURES = (0, 0, 1, 2)
PROMISED = 1e-5  # against FBGEMM, as in test_parity.py


def specs(device, tables=TABLES):
    where = CUDA if device.type == "cuda" else HOST
    return [(rows, dim, *where) for rows, dim in tables]


def make(device="cpu", tables=TABLES, **options):
    torch.manual_seed(3)
    options = {
        "optimizer": OptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.1,
        "feature_table_map": [*FEATURES],
    } | options
    device = torch.device(device)
    tbe = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(specs(device, tables), **options)
    tbe.init_embedding_weights_uniform(-1, 1)
    return tbe


def batch_for(tbe, seed=0, batch_size=6, **options):
    generator = torch.Generator().manual_seed(seed)
    rows = tbe.rows_per_table.tolist()
    lengths = torch.randint(0, 5, (len(rows), batch_size), generator=generator)
    return make_batch(rows, lengths, seed=seed, device=tbe.current_device, **options)


def train(tbe, steps=3, first_seed=0):
    outputs = []
    for seed in range(first_seed, first_seed + steps):
        batch = batch_for(tbe, seed)
        output = tbe(batch.indices, batch.offsets)
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


def assert_same_tables(a, b):
    for view, other in zip(a.split_embedding_weights(), b.split_embedding_weights(), strict=True):
        assert torch.equal(view, other)
    for states, others in zip(a.split_optimizer_states(), b.split_optimizer_states(), strict=True):
        assert all(torch.equal(state, other) for state, other in zip(states, others, strict=True))


def test_trains_as_the_module_inside(any_device):
    """The class adds names, not numbers."""
    tbe = make(any_device, table_names=["a", "b", "c"])
    other = copy.deepcopy(tbe.bags)
    for seed in range(3):
        batch = batch_for(tbe, seed)
        outputs = tbe(batch.indices, batch.offsets), other(batch.indices, batch.offsets)
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    assert torch.equal(tbe.bags.weights, other.weights)
    assert not torch.equal(tbe.bags.weights, make(any_device).bags.weights)


@pytest.mark.parametrize("dtype", [SparseType.FP32, SparseType.FP16, SparseType.BF16], ids=str)
@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD], ids=str)
def test_state_dict_round_trip(dtype, optimizer):
    """Training goes on with the same bits, stochastic rounding included."""
    tables = ((11, 3), (7, 8), (5, 1))  # padded
    tbe = make(tables=tables, weights_precision=dtype, optimizer=optimizer)
    train(tbe)
    torch.manual_seed(99)
    other = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(
        specs(torch.device("cpu"), tables), weights_precision=dtype, optimizer=optimizer,
        feature_table_map=[*FEATURES], learning_rate=0.1,
    )  # fmt: skip
    assert other.load_state_dict(tbe.state_dict()).missing_keys == []
    assert_same_tables(tbe, other)
    train(tbe, first_seed=5), train(other, first_seed=5)
    assert_same_tables(tbe, other)


def test_state_dict_inside_another_module():
    outer, other = (torch.nn.ModuleDict({"tbe": make(), "dense": torch.nn.Linear(2, 2)}) for _ in range(2))
    train(outer["tbe"])
    assert "tbe.weights_host" in outer.state_dict() and "tbe.bags.weights" not in outer.state_dict()
    other.load_state_dict(outer.state_dict())
    assert_same_tables(outer["tbe"], other["tbe"])


def test_state_dict_of_other_tables_is_refused():
    state = make(tables=((11, 4), (7, 8), (6, 12))).state_dict()
    with pytest.raises(RuntimeError, match="tables differ: rows_per_table"):
        make().load_state_dict(state)
    state = make().state_dict()
    state["weights_host"] = state["weights_host"][:-1]
    with pytest.raises(RuntimeError, match="size mismatch for weights_host: table 2 needs 60 elements"):
        make().load_state_dict(state)
    del state["momentum1_host"]
    with pytest.raises(RuntimeError, match="Missing key.*momentum1_host"):
        make().load_state_dict(state)


def test_views_share_memory():
    tbe = make()
    tbe.split_embedding_weights()[1].fill_(4.0)
    assert int((tbe.weights_host == 4.0).sum()) == 56
    tbe.get_optimizer_state()[2]["sum"].fill_(9.0)
    assert int((tbe.momentum1_host == 9.0).sum()) == 5
    assert tbe.weights_dev.numel() == tbe.weights_uvm.numel() == 0
    for table, (rows, dim) in enumerate(TABLES):
        start = tbe.weights_physical_offsets[table]
        view = tbe.weights_host[start : start + rows * dim].view(rows, dim)
        assert view.data_ptr() == tbe.split_embedding_weights()[table].data_ptr()


def test_weights_can_be_replaced():
    """The next forward uses what weights_host is then, and its backward trains that."""
    tbe = make()
    batch = batch_for(tbe)
    given = tbe.weights_host * 2
    tbe.weights_host = given
    doubled = tbe(batch.indices, batch.offsets)
    assert torch.equal(doubled, make()(batch.indices, batch.offsets) * 2)
    before = given.clone()
    doubled.sum().backward()
    assert not torch.equal(given, before) and tbe.weights_host.data_ptr() == given.data_ptr()
    with pytest.raises(ValueError, match="weights_dev must stay empty"):
        tbe.weights_dev = tbe.weights_host
    tbe.weights_dev = tbe.weights_host.new_empty(0)
    for wrong in (given[1:], given.half(), torch.stack([given, given], dim=1)[:, 0]):
        with pytest.raises(ValueError, match="weights_host must be a contiguous tensor of torch.float32 of shape"):
            tbe.weights_host = wrong


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(copier):
    tbe = make()
    train(tbe)
    other, before = copier(tbe), tbe.bags.weights.clone()
    train(other)
    assert torch.equal(tbe.bags.weights, before)
    train(tbe)
    assert_same_tables(tbe, other)


def test_learning_rate_of_the_forward_is_used(any_device):
    tbe = make(any_device, tables=((1, 4),), feature_table_map=None, optimizer=OptimType.EXACT_SGD, learning_rate=1.0)
    tbe.split_embedding_weights()[0].zero_()
    indices, offsets = torch.tensor([0], device=any_device), torch.tensor([0, 1], device=any_device)
    output = tbe(indices, offsets)
    tbe.set_learning_rate(100.0)
    output.sum().backward()
    assert torch.equal(tbe.split_embedding_weights()[0].cpu(), torch.full((1, 4), -1.0))
    tbe(indices, offsets).sum().backward()
    assert torch.equal(tbe.split_embedding_weights()[0].cpu(), torch.full((1, 4), -101.0))
    assert tbe.get_learning_rate() == 100.0


def test_hyper_parameters(any_device):
    tbe, other = make(any_device, eps=0.5), make(any_device)
    other.update_hyper_parameters({"eps": 0.5, "lr": 0.1, "beta1": 0.5})
    train(tbe), train(other)
    assert_same_tables(tbe, other)
    assert other.optimizer_args.eps == 0.5 and other.optimizer_args.beta1 == 0.5
    with pytest.raises(NotImplementedError, match="params_dict must have names of .* got 'momentum'"):
        other.update_hyper_parameters({"momentum": 0.5})
    with pytest.raises(ValueError, match="learning_rate must be a finite number >= 0, got -1"):
        other.set_learning_rate(-1)
    assert other.get_learning_rate() == pytest.approx(0.1)


def test_reset_of_rows(any_device):
    tbe = make(any_device)
    train(tbe)
    expected = [view.clone() for view in tbe.split_embedding_weights()]
    sums = [states["sum"].clone() for states in tbe.get_optimizer_state()]
    arguments = [[3, 0, 6, 2], [0, 1, 3, 4], [2, 1], [1, 2]]  # features 2 and 1: rows 0 and 6 of table 1, 2 of table 0
    tbe.reset_embedding_weight_momentum(*(torch.tensor(argument, device=any_device) for argument in arguments))
    for table, rows in ((1, [0, 6]), (0, [2])):
        expected[table][rows], sums[table][rows] = 0, 0
    for table in range(3):
        assert torch.equal(tbe.split_embedding_weights()[table], expected[table])
        assert torch.equal(tbe.get_optimizer_state()[table]["sum"], sums[table])


def test_batch_sizes(any_device):
    tbe = make(any_device)
    sizes = [[2, 1], [0, 1], [1, 1], [2, 0]]
    offsets = torch.arange(9, device=any_device)
    indices = torch.arange(8, device=any_device) % 5
    output = tbe(indices, offsets, batch_size_per_feature_per_rank=sizes)
    assert torch.equal(output, tbe.bags(indices, offsets, batch_sizes=sizes))


def test_optimizer_without_state():
    tbe = make(optimizer=OptimType.EXACT_SGD)
    assert tbe.split_optimizer_states() == [] and tbe.get_optimizer_state() == []
    assert len(tbe.get_all_states()) == 1


def test_managed_tables_are_placed_on_the_device_only_if_asked():
    spec = [(3, 4, EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)]
    with pytest.raises(
        NotImplementedError, match=r"embedding_specs\[0\] has location MANAGED_CACHING.*managed_as_device"
    ):
        fbtriton.SplitTableBatchedEmbeddingBagsCodegen(spec, device="meta")
    tbe = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(spec, device="meta", managed_as_device=True)
    assert tbe.embedding_specs[0][2] is EmbeddingLocation.DEVICE and tbe.weights_dev.numel() == 12


def both(fbgemm, pooling="SUM", tables=TABLES, **options):
    """FBGEMM's module and ours, from the same arguments, FBGEMM's enumerations included, with the same weights."""
    torch.manual_seed(3)
    spec = [(rows, dim, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU) for rows, dim in tables]
    options = {
        "feature_table_map": [*FEATURES], "optimizer": fbgemm.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1,
        "pooling_mode": fbgemm.PoolingMode[pooling], "weights_precision": fbgemm.SparseType.FP32,
    } | options  # fmt: skip
    theirs = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(spec, **options)
    theirs.init_embedding_weights_uniform(-1, 1)
    ours = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(spec, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_fbgemm_ten_steps_and_state_dict_both_ways(fbgemm, pooling, optimizer):
    theirs, ours = both(fbgemm, pooling, optimizer=fbgemm.OptimType[optimizer])
    for number in range(2):
        for step, (expected, actual) in enumerate(zip(train(theirs, 10), train(ours, 10), strict=True)):
            assert_close(actual, expected, tolerance=PROMISED, name=f"output {step}")
        state, other = fbgemm_state(theirs), ours.state_dict()
        assert set(state) == set(other)
        for name, tensor in state.items():
            assert (tensor.shape, tensor.dtype) == (other[name].shape, other[name].dtype), name
            if tensor.is_floating_point():
                assert_close(other[name], tensor, tolerance=PROMISED, name=name)
            else:
                assert torch.equal(tensor, other[name]), name
        if number == 0:
            load_into_fbgemm(theirs, other)
            ours.load_state_dict(theirs.state_dict())
            assert_same_tables(ours, theirs)


@pytest.mark.parity
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_fbgemm_ten_steps_without_pooling(fbgemm, index_dtype, optimizer):
    theirs, ours = both(
        fbgemm, "NONE", ((11, 8), (7, 8), (5, 8)), optimizer=fbgemm.OptimType[optimizer],
        embedding_table_index_type=index_dtype, embedding_table_offset_type=index_dtype,
    )  # fmt: skip
    for step, (expected, actual) in enumerate(zip(train(theirs, 10), train(ours, 10), strict=True)):
        assert_close(actual, expected, tolerance=PROMISED, name=f"output {step}")
    for kind in ("weights_host", "momentum1_host")[: len(ours.prefixes)]:
        assert_close(getattr(ours, kind), getattr(theirs, kind).detach(), tolerance=PROMISED, name=kind)


@pytest.mark.parity
def test_fbgemm_state_dict_of_managed_tables_loads(fbgemm):
    """A state_dict with tables in device and in unified memory, each with an offset of its own."""
    theirs, ours = both(fbgemm)
    state = theirs.state_dict()
    weights, sums = state["weights_host"], state["momentum1_host"]
    state |= {
        "weights_host": weights[:0], "weights_dev": weights[44:100],
        "weights_uvm": torch.cat([weights[:44], weights[100:]]),
        "weights_offsets": torch.tensor([0, 0, 0, 44]),
        "momentum1_host": sums[:0], "momentum1_dev": sums, "momentum1_offsets": torch.tensor([0, 0, 11, 18]),
    }  # fmt: skip
    state["weights_placements"] = torch.tensor([1, 1, 0, 2], dtype=torch.int32)
    state["momentum1_placements"] = torch.zeros(4, dtype=torch.int32)
    ours.init_embedding_weights_uniform(5, 6)
    ours.load_state_dict(state)
    assert_same_tables(ours, theirs)
