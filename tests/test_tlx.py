"""Long runs in one launch, against the reference and, where nothing is added in another order, to the bit against
accumulating and applying apart. The latter holds for the dims here: for others a compiler may fuse other operations of
the update (the H200's record has a case).

Where nothing of TLX is needed (fixed grid, ordered slots) these run on any Triton, in the interpreter too. Sums by TMA
need the fork and a GPU of sm_90 or later. Cluster launch control needs sm_100: its kernels are compiled and read in
test_tlx_compile.py, and run here where there is such a GPU. One command on a GPU machine: `make test-tlx`.
"""

import dataclasses
import os
import warnings

import pytest
import torch

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags, config, tlx
from fbtriton.config import FusedConfig, LongRunConfig, Target, force_config, select_fused
from fbtriton.forward.routing import plan_for_gpu
from fbtriton.testing import SPACING, assert_close, assert_same_step, make_batch, reference_step, run_step

CAPABILITY = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
LAUNCHES = int(os.environ.get("FBTRITON_TLX_LAUNCHES", "2000"))
needs_sm100 = pytest.mark.skipif(CAPABILITY < 10, reason="needs an sm_100 GPU")

FIXED = FusedConfig(programs_per_multiprocessor=8)
REDUCE = pytest.param(FusedConfig(reduce=True), marks=[pytest.mark.gpu, pytest.mark.tlx], id="reduce")
CLC = pytest.param(FusedConfig(clc=True), marks=[pytest.mark.gpu, pytest.mark.tlx, needs_sm100], id="clc")
CLC_REDUCE = pytest.param(
    FusedConfig(clc=True, reduce=True), marks=[pytest.mark.gpu, pytest.mark.tlx, needs_sm100], id="clc-reduce"
)
VARIANTS = [pytest.param(FIXED, id="slots"), REDUCE, CLC, CLC_REDUCE]


def build(dims, rows, device, optimizer="rowwise_adagrad", dtype=torch.float16, pooling="sum"):
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags(
        [Table(rows, dim) for dim in dims],
        optimizer=SGD(0.5) if optimizer == "sgd" else RowwiseAdagrad(0.5, initial_accumulator=0.125),
        weights_dtype=dtype,
        pooling=pooling,
        device=device,
    )
    return module.init_uniform_(-1, 1)


def batch_of(module, lengths, hot, device, seed=0, weighted=False):
    """A batch of the given bag lengths for each feature, and its gradient."""
    rows, dims = zip(*module.spec.tables, strict=True)
    batch = make_batch(rows, [torch.tensor(lengths)] * len(rows), seed=seed, hot=hot, weighted=weighted, device=device)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.rand(len(lengths), sum(dims), generator=generator) * 2 - 1
    return batch, grad.to(device)


def step(module, batch, grad, fused, long_run=None):
    with force_config(fused=fused, long_run=long_run):
        return run_step(module, batch, grad)


@pytest.mark.interpreter
@pytest.mark.parametrize("fused", VARIANTS)
@pytest.mark.parametrize("fan_in", [2, 3, 64])
@pytest.mark.parametrize("dims", [(4,), (8, 20)], ids=str)
@pytest.mark.parametrize("optimizer, weighted", [("sgd", True), ("rowwise_adagrad", False)])
def test_against_reference_and_two_launches(fused, fan_in, dims, optimizer, weighted, device):
    """One hot row of many pieces and some levels, rows of few pieces, and rows below the threshold."""
    long_run = LongRunConfig(threshold=3, piece_length=4, rows_per_step=2, fan_in=fan_in)
    results = []
    for path in (fused, False):
        module = build(dims, 9, device, optimizer)
        batch, grad = batch_of(module, (30, 25), 0.5, device, weighted=weighted)
        expected = reference_step(module, batch, grad)
        results.append(step(module, batch, grad, path, long_run))
        assert_same_step(results[-1], expected, terms=2 * 55, module=module)
    if not fused.reduce and fan_in != 3:  # two slots have one order; with 64 there is no group
        assert torch.equal(results[0].weights, results[1].weights)
        assert all(torch.equal(a, b) for a, b in zip(results[0].states, results[1].states, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("fused", VARIANTS)
@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 11, 12, 19, 20, 35, 36])
def test_lengths_around_pieces_and_groups(fused, length, device):
    """A single run of no, 1 to 5, 8 or 9 pieces of 4; groups of 4 pieces."""
    long_run = LongRunConfig(threshold=4, piece_length=4, rows_per_step=2, fan_in=4)
    module = build((8,), 1, device, "sgd", torch.float32)
    batch, grad = batch_of(module, (length,), 1.0, device)
    expected = reference_step(module, batch, grad)
    assert_same_step(step(module, batch, grad, fused, long_run), expected, terms=length, module=module)


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("fused", VARIANTS)
@pytest.mark.parametrize("programs", [1, 8, 32])
@pytest.mark.parametrize("dim, dtype", [(128, torch.float16), (64, torch.float32), (100, torch.bfloat16)], ids=str)
def test_contention(fused, programs, dim, dtype, device):
    """Many programs at a few counters, again and again: one hot row of thousands of pieces beside rows of a few.
    FBTRITON_TLX_LAUNCHES is the number of launches of each variant. The memory that workspaces are made of, counters
    included, is poisoned. Gradients are integers, so sums are exact in any order: not one row may be wrong."""
    fused = dataclasses.replace(fused, programs_per_multiprocessor=programs)
    long_run = LongRunConfig(threshold=4, piece_length=4, rows_per_step=4, fan_in=4)
    module = build((dim,), 300, device, "sgd", dtype)
    batch, grad = batch_of(module, (20_000, 20_000), 0.3, device)
    grad = torch.randint_like(grad, -1, 2)
    start, seed_and_step = module.weights.zero_().clone(), module.seed_and_step.clone()
    expected = step(module, batch, grad, False, long_run).weights
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(max(1, LAUNCHES // 9)):
        module.weights.copy_(start)
        module.seed_and_step.copy_(seed_and_step)
        poison = torch.full((2**20,), 2**31 - 1, dtype=torch.int32, device=device)
        del poison  # its memory is what the next workspace is made of
        with force_config(fused=fused, long_run=long_run):
            module(batch.indices, batch.offsets).backward(grad)
        wrong += (module.weights != expected).view(300, dim).any(dim=1).sum()
    assert wrong.item() == 0


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("fused", VARIANTS)
def test_replay_of_a_graph(fused, device):
    """Captured once and replayed with other ids: the counters are clean each time."""
    module = build((32,), 50, device)
    batch, grad = batch_of(module, (3000, 3000), 0.5, device)
    with force_config(fused=fused, long_run=LongRunConfig(fan_in=4)):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            build((32,), 50, device)(batch.indices, batch.offsets).backward(grad)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(batch.indices, batch.offsets).backward(grad)
    tolerance = 4 * 6000 * SPACING[torch.float32] + SPACING[torch.float16]
    for seed in range(5):
        fresh, _ = batch_of(module, (3000, 3000), 0.2 * seed, device, seed)
        batch.indices.copy_(fresh.indices)
        expected = reference_step(module, batch, grad)
        graph.replay()
        assert_close(module.weights, expected.weights, tolerance=tolerance, name="weights")


@pytest.fixture
def installed(monkeypatch):
    """Pretends that TLX is installed, or not."""
    config._warn_of_missing_tlx.cache_clear()
    yield lambda value: monkeypatch.setattr(tlx, "available", lambda: value)
    config._warn_of_missing_tlx.cache_clear()


def test_blackwell_with_tlx_takes_it(installed):
    installed(True)
    target = Target("NVIDIA B200", 148, 100)
    chosen = select_fused(target, (64, 128), True)
    assert chosen is not None and chosen.clc and not chosen.reduce
    assert select_fused(target, (64, 128), False).reduce
    assert not select_fused(target, (64, 512), False).reduce, "too wide for a TMA box: ordered slots"
    assert select_fused(target, (64, 4096), True) is None, "out of range"


def test_other_targets_do_not(installed):
    installed(True)
    for target in (Target("NVIDIA H200", 132, 90), Target("AMD Instinct MI300X", 304, 0), Target("interpreter", 1)):
        assert select_fused(target, (64,), True) is None
        assert select_fused(target, (64,), False) is None


def test_blackwell_without_tlx_warns_once(installed):
    installed(False)
    target = Target("NVIDIA GB200", 148, 100)
    with pytest.warns(UserWarning, match="NVIDIA GB200 could take long runs in one launch, but this Triton has no TLX"):
        assert select_fused(target, (64,), True) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_fused(target, (64,), True) is None


def test_the_plan_says_so(installed):
    installed(True)
    spec = TableBatchedEmbeddingBags([Table(10, 8)], optimizer=SGD(0.1), device="cpu").spec
    assert "backward fused long_run (TLX): features 0" in str(plan_for_gpu(spec, "NVIDIA B200", 20.0, capability=100))
    assert "backward grad_accum + apply: features 0" in str(plan_for_gpu(spec, "NVIDIA H200", 20.0))
