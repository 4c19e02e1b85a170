"""What only a GPU can show: graphs, repeatability, large tables, assertions on the device, memory."""

import subprocess
import sys

import pytest
import torch

from fbtriton import (
    SGD,
    Adam,
    ComputeDevice,
    EmbeddingLocation,
    Lamb,
    OptimType,
    RowwiseAdagrad,
    SplitTableBatchedEmbeddingBagsCodegen,
    Table,
    TableBatchedEmbeddingBags,
)
from fbtriton.testing import assert_same_step, make_batch, reference_step, run_step

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def make(rows=(20_000, 300, 5), dims=(128, 64, 12), seed=0, **options):
    torch.manual_seed(seed)
    options = {"optimizer": RowwiseAdagrad(0.05), "device": "cuda"} | options
    tables = [Table(r, d) for r, d in zip(rows, dims, strict=True)]
    return TableBatchedEmbeddingBags(tables, **options).init_uniform_(-1, 1)


def batch_for(module, batch_size=256, longest=40, seed=0, **options):
    lengths = torch.randint(
        0, longest, (len(module.spec.feature_tables), batch_size), generator=torch.Generator().manual_seed(seed)
    )
    rows = [module.spec.tables[table][0] for table in module.spec.feature_tables]
    return make_batch(rows, lengths, seed=seed, device="cuda", **options)


def gradient(module, batch_size=256, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    columns = module.spec.layout.columns[-1]
    grad = torch.rand(batch_size, columns, device="cuda", generator=generator) * 2 - 1
    return grad.to(module.spec.torch_output_dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_many_ids_against_the_reference(dtype, pooling, weighted):
    """Runs of one entry, of thousands and of everything between; tables shared by features."""
    module = make(weights_dtype=dtype, output_dtype=dtype, pooling=pooling, feature_table_map=[0, 1, 2, 1, 0])
    batch = batch_for(module, weighted=weighted, hot=0.1, pruned=0.05, padding=100)
    grad = gradient(module)
    expected = reference_step(module, batch, grad, weighted)
    terms = int(torch.bincount(batch.indices.clamp(0, 20_000)).max())
    assert_same_step(run_step(module, batch, grad, weighted), expected, terms=terms, module=module)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hundred_runs_are_bit_identical(dtype):
    results = []
    for _ in range(100):
        module = make(weights_dtype=dtype, feature_table_map=[0, 1, 2, 1])
        for step in range(2):
            run_step(module, batch_for(module, hot=0.1, seed=step), gradient(module, seed=step))
        results.append((module.weights, module.sum))
    for weights, state in results[1:]:
        assert torch.equal(weights, results[0][0]) and torch.equal(state, results[0][1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(0.05), Adam(0.05), Lamb(0.05)], ids=lambda o: o.name)
def test_graph_replay_equals_eager(optimizer, dtype):
    """New ids, learning rate, step and iteration reach a captured graph."""
    eager, captured = (make(weights_dtype=dtype, optimizer=optimizer) for _ in range(2))
    lengths = torch.randint(0, 40, (3, 256), generator=torch.Generator().manual_seed(9))
    batches = [make_batch((20_000, 300, 5), lengths, seed=seed, hot=0.05, device="cuda") for seed in range(4)]
    indices, offsets, grad = batches[0].indices.clone(), batches[0].offsets, gradient(eager)
    warm = make(weights_dtype=dtype, optimizer=optimizer)  # compiles
    run_step(warm, batches[0], grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = {name: value.clone() for name, value in captured.state_dict().items()}
    with torch.cuda.stream(stream):
        captured(indices, offsets).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = captured(indices, offsets)
        output.backward(grad)
    captured.load_state_dict(before)
    for step, batch in enumerate(batches):
        eager.learning_rate = captured.learning_rate = 0.1 / (step + 1)
        indices.copy_(batch.indices)
        graph.replay()
        expected = run_step(eager, batch, grad)
        assert torch.equal(output, expected.output)
        assert torch.equal(captured.weights, expected.weights)
        assert torch.equal(captured.seed_and_step, eager.seed_and_step)
        if optimizer.counts_iterations:
            assert captured.iter.tolist() == eager.iter.tolist() == [step + 1]


def test_graph_with_a_batch_size_for_each_feature():
    """A replay finds the batch sizes, although pinned memory was given away and written since."""
    module = make(rows=(2000, 300), dims=(64, 64))
    sizes = [[5, 2], [1, 6]]
    lengths = [torch.randint(0, 9, (sum(of_feature),)) for of_feature in sizes]
    batch = make_batch((2000, 300), lengths, seed=0, device="cuda")
    expected = module(batch.indices, batch.offsets, batch_sizes=sizes).detach()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(batch.indices, batch.offsets, batch_sizes=sizes)
    others = [torch.full((size,), -1, dtype=torch.int64).pin_memory() for size in range(1, 65)]
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected) and len(others) == 64


def test_graph_sees_what_is_set_on_fbgemms_class():
    """Adam's numbers and its step, between replays."""
    specs = [(300, 64, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)]
    warm, eager, captured = (SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=OptimType.ADAM) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (1000,), generator=generator).cuda()
    offsets = torch.arange(0, 1001, 10, device="cuda")
    grad = (torch.rand(100, 64, generator=generator) - 0.5).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm(ids, offsets).backward(grad)  # compiles, outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(ids, offsets).backward(grad)
    for step in range(3):
        for tbe in (eager, captured):
            tbe.update_hyper_parameters({"lr": 0.5 / (step + 1), "beta1": 0.5 + 0.1 * step, "weight_decay": 0.1 * step})
            tbe.set_optimizer_step(10 * step)
        graph.replay()
        eager(ids, offsets).backward(grad)
        assert captured.iter.tolist() == eager.iter.tolist() == [10 * step + 1]
        assert torch.equal(captured.weights_dev, eager.weights_dev)
        assert torch.equal(captured.momentum2_dev, eager.momentum2_dev)
    assert bool(captured.weights_dev.any())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_weights_past_2_to_the_31(index_dtype):
    """More than 2^31 elements in one table, its first and last rows; fp16, 4.3 GB."""
    rows = 2**24 + 8
    module = TableBatchedEmbeddingBags(
        [Table(8, 4), Table(rows, 128)], optimizer=SGD(1.0), weights_dtype=torch.float16, device="cuda"
    )
    table = module.split_embedding_weights()[1]
    table[0], table[-1], table[-2] = 1.0, 2.0, 4.0
    indices = torch.tensor([7, rows - 1, rows - 2, 0], dtype=index_dtype, device="cuda")
    offsets = torch.tensor([0, 1, 4], device="cuda")
    weights = torch.ones(4, device="cuda", requires_grad=True)
    output = module(indices, offsets, weights)
    assert torch.equal(output[0, 4:], torch.full((128,), 7.0, device="cuda"))
    output.backward(torch.ones_like(output))
    assert weights.grad.tolist() == [0.0, 256.0, 512.0, 128.0]
    assert [float(table[row, 0]) for row in (0, -1, -2)] == [0.0, 1.0, 3.0]
    assert int((table.view(-1, 128)[:, 0] != 0).sum()) == 2


def test_rows_past_2_to_the_31():
    """Row numbers of all tables together pass 2^31: keys are int64. Two tables of 1.1e9 x 1 fp16, 4.4 GB."""
    rows = 1_100_000_000
    module = TableBatchedEmbeddingBags(
        [Table(rows, 1), Table(rows, 1)], optimizer=RowwiseAdagrad(1.0), weights_dtype=torch.float16, device="cuda"
    )
    assert module.spec.layout.key_dtype == torch.int64
    indices = torch.tensor([0, rows - 1, 0, rows - 1, rows - 1], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 2, 5], device="cuda")
    module(indices, offsets).sum().backward()
    views = module.split_embedding_weights()
    assert [float(view[row]) for view in views for row in (0, -1)] == [-1.0] * 4
    assert [float(state[0][row]) for state in module.split_optimizer_states() for row in (0, -1)] == [1, 1, 1, 4]
    assert sum(int((view != 0).sum()) for view in views) == 4


@pytest.mark.parametrize("indices, offsets", [("[0, 9]", "[0, 2]"), ("[0, 1]", "[1, 2]")], ids=["bad id", "bad offset"])
def test_fatal_is_a_device_assertion(indices, offsets):
    """In a process of its own: a device assertion ends the CUDA context."""
    script = f"""
import torch
from fbtriton import SGD, Table, TableBatchedEmbeddingBags
module = TableBatchedEmbeddingBags([Table(4, 4)], optimizer=SGD(1.0), bounds_check="fatal", device="cuda")
module(torch.tensor([0, 3], device="cuda"), torch.tensor([0, 2], device="cuda"))
torch.cuda.synchronize()
print("good input passed", flush=True)
module(torch.tensor({indices}, device="cuda"), torch.tensor({offsets}, device="cuda"))
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "good input passed" in result.stdout, result.stderr
    assert result.returncode != 0 and "assert" in result.stderr


def test_no_synchronisation():
    """A forward and a backward never wait for the device."""
    module = make(feature_table_map=[0, 1, 2, 1])
    batch, grad = batch_for(module), gradient(module)
    run_step(module, batch, grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(batch.indices, batch.offsets).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_memory_within_one_workspace_of_eager():
    """`torch.compile` must not clone the weights: 512 MB of them here."""
    peaks = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        module = make(rows=(1_000_000,), dims=(128,), optimizer=SGD(0.1))
        call = torch.compile(module, fullgraph=True) if compiled else module
        batch, grad = batch_for(module, 1024), gradient(module, 1024)
        for _ in range(2):
            call(batch.indices, batch.offsets).backward(grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(batch.indices, batch.offsets).backward(grad)
        torch.cuda.synchronize()
        peaks[compiled] = torch.cuda.max_memory_allocated() - before
        del module, call
    workspace = peaks[False]
    assert peaks[True] <= 2 * workspace, peaks
    assert peaks[True] < 512 * 2**20
