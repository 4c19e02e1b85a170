"""What PyTorch does to modules: moving, casting, copying, compiling, autocast, inference mode, meta tensors.

Both of ours go through it, the native module and FBGEMM's class. What needs a GPU is at the end.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fbtriton
from fbtriton import Adam, ComputeDevice, EmbeddingLocation, OptimType, RowwiseAdagrad, Table

ROWS, DIMS = (9, 5, 7), (4, 3, 8)
OPTIONS = [pytest.param(name, id=name) for name in ("native", "fbgemm")]


def make(kind, device="cpu", **options):
    torch.manual_seed(0)
    if kind == "native":
        tables = [Table(rows, dim) for rows, dim in zip(ROWS, DIMS, strict=True)]
        module = fbtriton.TableBatchedEmbeddingBags(tables, optimizer=RowwiseAdagrad(0.1), device=device, **options)
    else:
        host = torch.device(device).type == "cpu"
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU) if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        module = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *place) for rows, dim in zip(ROWS, DIMS, strict=True)],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, device=device, **options,
        )  # fmt: skip
    for number, view in enumerate(module.split_embedding_weights()):
        if not view.is_meta:
            view.copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(number)))
    return module


def batch(device="cpu", seed=0):
    ids = torch.randint(0, 5, (9,), generator=torch.Generator().manual_seed(seed))
    return ids.to(device), torch.tensor([0, 2, 3, 3, 6, 8, 9], device=device)


def train(module, device="cpu", steps=3, seed=0):
    for step in range(steps):
        module(*batch(device, seed + step)).square().sum().backward()
    return module


def weights(module):
    return torch.cat([view.flatten() for view in module.split_embedding_weights()])


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casts_are_refused(kind, cast):
    outer = torch.nn.Sequential(make(kind))
    with pytest.raises(ValueError, match="dtype must stay torch.float32, got torch.* fixed at construction"):
        getattr(outer, cast)()
    train(outer[0])


def test_casts_of_half_precision_are_refused():
    """half() would leave the weights as they are, but not the state."""
    module = make("native", weights_dtype=torch.float16)
    for cast in ("half", "float"):
        with pytest.raises(ValueError, match="dtype must stay"):
            getattr(module, cast)()
    train(module)


@pytest.mark.parametrize("kind", OPTIONS)
def test_moves_that_change_nothing(kind):
    module, other = make(kind), make(kind)
    moved = module.to("cpu").float().cpu()
    assert moved is module
    assert torch.equal(weights(train(module)), weights(train(other)))


@pytest.mark.parametrize("kind", OPTIONS)
def test_meta(kind):
    """Shapes without memory; then memory, and everything as at construction."""
    module = make(kind, "meta")
    output = module(*batch("meta"))
    assert output.is_meta and output.shape == (2, sum(DIMS)) and output.dtype == torch.float32
    module.to_empty(device="cpu")
    assert not weights(module).any()
    other = make(kind)
    for view, given in zip(module.split_embedding_weights(), other.split_embedding_weights(), strict=True):
        view.copy_(given)
    assert torch.equal(weights(train(module)), weights(train(other)))
    if kind == "fbgemm":
        assert module.D_offsets.tolist() == [0, 4, 7, 15] and module.hash_size_cumsum.tolist() == [0, 9, 14, 21]


def test_state_dict_does_not_load_into_meta_tensors():
    with pytest.raises(RuntimeError, match="weights are on the meta device; give them memory first"):
        make("fbgemm", "meta").load_state_dict(make("fbgemm").state_dict(), strict=False)


@pytest.mark.parametrize("kind", OPTIONS)
def test_autocast(kind):
    """Autocast casts what goes into matrix products, and leaves embeddings alone."""
    module, other = make(kind), make(kind)
    linear = torch.nn.Linear(sum(DIMS), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(*batch())
        assert output.dtype == torch.float32
        product = linear(output)
        assert product.dtype == torch.bfloat16
        loss = product.float().sum()
    loss.backward()
    grad = torch.ones(2, 3, dtype=torch.bfloat16) @ linear.weight.bfloat16()
    other(*batch()).backward(grad.float())
    assert torch.equal(weights(module), weights(other))


@pytest.mark.parametrize("kind", OPTIONS)
def test_inference_mode(kind):
    module = make(kind)
    expected = module(*batch())
    with torch.inference_mode():
        output = module(*batch())
    assert output.is_inference() and torch.equal(output, expected)
    train(module)  # and the module still trains


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(kind, reentrant):
    """The forward runs twice, the rows are updated once."""
    module, other = make(kind), make(kind)
    dense = torch.nn.Linear(sum(DIMS), 3)
    outer = torch.ones(1, requires_grad=True)  # reentrant checkpointing wants an input with a gradient

    def forward(scale):
        return dense(module(*batch()) * scale).sum()

    checkpoint(forward, outer, use_reentrant=reentrant).backward()
    dense(other(*batch())).sum().backward()
    assert torch.equal(weights(module), weights(other))


@pytest.mark.parametrize("kind", OPTIONS)
def test_compile(kind):
    """One graph, which stays when sizes, the learning rate and the number of steps change."""
    torch._dynamo.reset()
    module, other = make(kind), make(kind)
    call = torch.compile(module, fullgraph=True)
    for step in range(4):
        call(*batch(seed=step)).square().sum().backward()
        other(*batch(seed=step)).square().sum().backward()
        for each in (module, other):
            each.set_learning_rate(0.5 / (step + 1)) if kind == "fbgemm" else setattr(each, "learning_rate", 0.5)
    assert torch.equal(weights(module), weights(other))
    with torch._dynamo.config.patch(error_on_recompile=True):
        call(*batch(seed=9)).square().sum().backward()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": lambda module: torch.load(_saved(module), weights_only=False),
}


def _saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_copies(kind, copier):
    module = train(make(kind))
    other, before = copier(module), weights(module)
    train(other)
    assert torch.equal(weights(module), before)
    assert torch.equal(weights(train(module)), weights(other))


@pytest.mark.parametrize("kind", OPTIONS)
def test_state_dict_through_a_file(kind):
    """Seed and step of stochastic rounding come along."""
    precision = (
        {"weights_dtype": torch.float16} if kind == "native" else {"weights_precision": fbtriton.SparseType.FP16}
    )
    module, file = train(make(kind, **precision)), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1234)
    other = make(kind, **precision)
    train(other, steps=1)
    other.load_state_dict(torch.load(file))
    assert torch.equal(weights(train(module, seed=7)), weights(train(other, seed=7)))


@pytest.mark.parametrize("kind", OPTIONS)
def test_frozen_tables(kind, any_device):
    """Their rows and states stay to the bit, others are trained as before; gradients of per-sample weights go on."""
    frozen, free = make(kind, any_device, frozen_tables=[0, 2]), make(kind, any_device)
    ids, offsets = batch(any_device)
    before = [view.clone() for view in frozen.split_embedding_weights()]
    grads = []
    for module in (frozen, free):
        sample_weights = torch.full((9,), 0.5, device=any_device, requires_grad=True)
        module(ids, offsets, sample_weights).square().sum().backward()
        grads.append(sample_weights.grad)
    assert torch.equal(*grads)
    for table, expected in enumerate(before):
        view, other = frozen.split_embedding_weights()[table], free.split_embedding_weights()[table]
        assert torch.equal(view, expected if table in (0, 2) else other) and not torch.equal(other, expected)
    assert [bool(states[0].any()) for states in frozen.split_optimizer_states()] == [False, True, False]
    frozen.freeze_tables([])
    frozen(ids, offsets).sum().backward()
    assert not torch.equal(frozen.split_embedding_weights()[0], before[0])


def test_frozen_tables_are_checked():
    with pytest.raises(ValueError, match=r"frozen_tables must be table numbers in \[0, 3\), got 3"):
        make("native", frozen_tables=[3])
    with pytest.raises(ValueError, match=r"frozen_tables must be table numbers in \[0, 3\), got 'a'"):
        make("native").freeze_tables(["a"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIONS)
def test_move_to_the_gpu_and_back(kind):
    module, other = make(kind), make(kind, "cuda")
    moved = train(module.cuda(), "cuda")
    assert weights(moved).is_cuda and torch.equal(weights(moved), weights(train(other, "cuda")))
    assert not weights(moved.cpu()).is_cuda
    train(moved)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_cuda_graph(kind, pooling):
    """A captured step replays with new ids, learning rate and step, without a sync while it is captured."""
    option = {"pooling": pooling} if kind == "native" else {"pooling_mode": fbtriton.PoolingMode[pooling.upper()]}
    modules = []
    for _ in range(2):
        modules.append(make_of_one_dim(kind, option))
    captured, eager = modules
    ids, offsets = batch("cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured(ids, offsets).square().sum().backward()  # compiles, outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    eager(ids, offsets).square().sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured(ids, offsets).square().sum().backward()
    for step in range(3):
        ids.copy_(batch("cuda", seed=step)[0])
        for module in modules:
            rate = 0.1 / (step + 1)
            module.set_learning_rate(rate) if kind == "fbgemm" else setattr(module, "learning_rate", rate)
        graph.replay()
        eager(ids, offsets).square().sum().backward()
        assert torch.equal(weights(captured), weights(eager))


def make_of_one_dim(kind, options):
    torch.manual_seed(0)
    if kind == "native":
        tables = [Table(rows, 8) for rows in ROWS]
        return fbtriton.TableBatchedEmbeddingBags(
            tables, optimizer=RowwiseAdagrad(0.1), device="cuda", **options
        ).init_uniform_(-1, 1)
    specs = [(rows, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows in ROWS]
    module = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1, **options
    )
    module.init_embedding_weights_uniform(-1, 1)
    return module


def test_iterations_under_checkpointing(any_device):
    """A forward that checkpointing runs again is one with gradients on, and counts."""
    module = fbtriton.TableBatchedEmbeddingBags([Table(5, 4)], optimizer=Adam(0.1), device=any_device)
    indices, offsets = torch.tensor([1, 2], device=any_device), torch.tensor([0, 2], device=any_device)
    checkpoint(module, indices, offsets, use_reentrant=False).sum().backward()
    assert module.iter == 2
    module(indices, offsets).sum().backward()
    assert module.iter == 3
