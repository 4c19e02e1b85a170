"""Unpooled embeddings: kernels and reference against indexing, and the ways through the operator that are their own."""

import pytest
import torch

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.config import INTERPRET, LongRunConfig, force_config
from fbtriton.sequence import first_entries, place_entries, reference_places
from fbtriton.testing import SPACING, assert_close

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FEATURES = [0, 1, 0, 2]
OFFSETS = [0, 2, 3, 3, 7, 9, 9, 9, 10]  # 4 features, 2 samples, 10 ids
IDS = [0, 4, 4, 5, 5, 2, 0, 4, 1, 1]


def make(device, rows=(5, 6, 3), dim=8, features=None, **options):
    torch.manual_seed(0)
    options = {"optimizer": SGD(0.5), "pooling": "none", "stochastic_rounding": False} | options
    tables = [Table(count, dim) for count in rows]
    module = TableBatchedEmbeddingBags(
        tables, feature_table_map=FEATURES if features is None else features, device=device, **options
    )
    return module.init_uniform_(-1, 1)


def tables_of_entries(offsets=OFFSETS, num_features=4):
    samples = (len(offsets) - 1) // num_features
    tables = []
    for feature in range(num_features):
        begin, end = offsets[feature * samples], offsets[(feature + 1) * samples]
        tables += [FEATURES[feature]] * (end - begin)
    return tables


@pytest.mark.parametrize("weights_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8, 20])
def test_rows_are_copied_and_trained(dim, weights_dtype, any_device):
    """A copy is exact; the step of SGD is rounded once, from an exact sum of at most three small numbers."""
    module = make(any_device, dim=dim, weights_dtype=weights_dtype, output_dtype=weights_dtype)
    before = [view.clone() for view in module.split_embedding_weights()]
    output = module(torch.tensor(IDS, device=any_device), torch.tensor(OFFSETS, device=any_device))
    where = list(zip(tables_of_entries(), IDS, strict=True))
    assert torch.equal(output, torch.stack([before[table][row] for table, row in where]))
    generator = torch.Generator().manual_seed(1)
    grad = (torch.randint(-8, 9, (len(IDS), dim), generator=generator) / 8).to(weights_dtype).to(any_device)
    output.backward(grad)
    expected = [view.double() for view in before]
    for entry, (table, row) in enumerate(where):
        expected[table][row] -= 0.5 * grad[entry].double()
    for view, old, new in zip(module.split_embedding_weights(), before, expected, strict=True):
        assert_close(view, new, tolerance=SPACING[weights_dtype], name="weights")
        untouched = (new == old.double()).all(dim=1)
        assert torch.equal(view[untouched], old[untouched])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64], ids=str)
def test_equals_pooling_of_bags_of_one_id(index_dtype, offset_dtype, any_device):
    """Steps of row-wise Adagrad, in which rows have runs of two pieces: the same bits as summing bags of one id."""
    features, size = [0, 1, 0], 48
    unpooled = make(any_device, features=features, rows=(5, 6), optimizer=RowwiseAdagrad(0.1))
    pooled = make(any_device, features=features, rows=(5, 6), optimizer=RowwiseAdagrad(0.1), pooling="sum")
    with force_config(long_run=LongRunConfig(threshold=8, piece_length=16, rows_per_step=4)):
        for seed in range(2):
            ids = torch.randint(0, 3, (3 * size,), generator=torch.Generator().manual_seed(seed)).to(index_dtype)
            most = torch.bincount(torch.cat([ids[:size], ids[2 * size :]])).max()
            assert int(most) > 30, "then it is cut, wherever it starts"
            grad = torch.rand(3 * size, 8, generator=torch.Generator().manual_seed(seed)).to(any_device)
            ids, offsets = ids.to(any_device), torch.arange(3 * size + 1, dtype=offset_dtype, device=any_device)
            rows, bags = unpooled(ids, offsets), pooled(ids, offsets)
            assert torch.equal(rows.view(3, size, 8).transpose(0, 1).reshape(size, 24), bags)
            rows.backward(grad)
            bags.backward(grad.view(3, size, 8).transpose(0, 1).reshape(size, 24))
            assert torch.equal(unpooled.weights, pooled.weights)
            assert torch.equal(unpooled.sum, pooled.sum)


@pytest.mark.parametrize("bounds_check", ["off", "ignore", "warning"])
def test_pruned_and_padding(bounds_check, any_device):
    """They give zeros and train nothing."""
    module = make(any_device, bounds_check=bounds_check)
    before = module.weights.clone()
    ids = torch.tensor([-1] * len(IDS) + [2, 999], device=any_device)
    output = module(ids, torch.tensor(OFFSETS, device=any_device))
    assert output.shape == (len(IDS) + 2, 8) and not output.any()
    output.sum().backward()
    assert torch.equal(module.weights, before)


def test_bad_input_is_repaired_and_reported(any_device):
    """A bad id reads and trains row 0; the report says feature and sample, not entry."""
    module = make(any_device, optimizer=SGD(1.0))
    offsets, ids = list(OFFSETS), list(IDS)
    ids[4], offsets[5] = 77, 8  # feature 1, sample 1; feature 2's second offset, which is then still in order
    before = [view.clone() for view in module.split_embedding_weights()]
    output = module(torch.tensor(ids, device=any_device), torch.tensor(offsets, device=any_device))
    assert torch.equal(output[4], before[1][0])
    output.sum().backward()
    assert torch.equal(module.split_embedding_weights()[1][0], before[1][0] - 2.0)  # entry 6 is row 0 too
    assert (module.bounds_report().bad_ids, module.bounds_report().first_bad_id) == (1, (1, 1, 77))
    module(torch.tensor(IDS, device=any_device), torch.tensor([0, 2, 3, 3, 7, 1, 9, 9, 99], device=any_device))
    assert module.bounds_report().bad_offsets == 2


@pytest.mark.skipif(INTERPRET, reason="the interpreter evaluates no device assertions")
def test_fatal():
    module = make("cpu", bounds_check="fatal")
    with pytest.raises(ValueError, match=r"indices of feature 0 must be in \[0, 5\) or -1, got 77 in sample 0"):
        module(torch.tensor([77]), torch.tensor([0] + [1] * 8))


@pytest.mark.parametrize("offsets, size", [([0], 0), ([0], 3), ([0] * 9, 0), ([0] * 9, 2)])
def test_empty(offsets, size, any_device):
    module = make(any_device)
    before = module.weights.clone()
    output = module(torch.zeros(size, dtype=torch.int64, device=any_device), torch.tensor(offsets, device=any_device))
    assert output.shape == (size, 8) and not output.any()
    output.sum().backward()
    assert torch.equal(module.weights, before)


@pytest.mark.parametrize("garbage", [[5, -3, 2, 99, 1, 0, 7, 3, -1], [2**40] * 9, [-1] * 9], ids=str)
def test_garbage_offsets_without_a_check_stay_inside(garbage, any_device):
    """Nothing is promised but that memory is safe: outputs are rows of some table, or zeros."""
    module = make(any_device, bounds_check="off")
    output = module(torch.zeros(10, dtype=torch.int64, device=any_device), torch.tensor(garbage, device=any_device))
    rows = [torch.zeros(8, device=any_device)] + [view[0] for view in module.split_embedding_weights()]
    assert all(any(torch.equal(line, row) for row in rows) for line in output)
    output.sum().backward()
    assert torch.isfinite(module.weights).all()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "offsets", [OFFSETS, [0] * 9, [0, 9, 9, 9, 9, 9, 9, 9, 10], [0, 0, 0, 0, 0, 0, 0, 0, 3]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_placement(offsets, dtype, device):
    """The kernel against PyTorch."""
    spec, indices = make(device).spec, torch.zeros(10, dtype=torch.int64, device=device)
    offsets = torch.tensor(offsets, dtype=dtype, device=device)
    placed = place_entries(indices, offsets, spec)
    expected = reference_places(first_entries(indices, offsets, spec), 10, dtype, spec)
    for tensor, other in zip([placed.offsets, *placed.vbe], [expected.offsets, *expected.vbe], strict=True):
        assert torch.equal(tensor, other) and tensor.dtype == other.dtype


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_gradient_strides(kind, any_device):
    modules = make(any_device), make(any_device)
    ids, offsets = torch.tensor(IDS, device=any_device), torch.tensor(OFFSETS, device=any_device)
    grad = torch.full((1, 1), 0.25, device=any_device).expand(10, 8)
    if kind == "transposed":
        grad = torch.arange(80.0, device=any_device).view(8, 10).t()
    for module, given in zip(modules, (grad, grad.contiguous()), strict=True):
        module(ids, offsets).backward(given)
    assert torch.equal(modules[0].weights, modules[1].weights)


def test_compiled(any_device):
    """One graph, sizes that change, the same bits as eager."""
    torch._dynamo.reset()
    eager, module = make(any_device), make(any_device)
    call = torch.compile(module, fullgraph=True)
    for size in (8, 12, 20):
        ids = torch.arange(size, device=any_device) % 3
        offsets = torch.arange(9, device=any_device) * (size // 8)
        outputs = eager(ids, offsets), call(ids, offsets)
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(eager.weights, module.weights)


def test_opcheck(any_device):
    module = make(any_device)
    arguments = torch.tensor(IDS, device=any_device), torch.tensor(OFFSETS, device=any_device), module.spec.text
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.fbtriton.place_entries, arguments, test_utils=tests)


def test_refused():
    with pytest.raises(ValueError, match=r"tables must have one dim with pooling 'none', got \[4, 8\]"):
        TableBatchedEmbeddingBags([Table(2, 4), Table(2, 8)], optimizer=SGD(0.1), pooling="none", device="cpu")
    module, ids, offsets = make("cpu"), torch.tensor(IDS), torch.tensor(OFFSETS)
    with pytest.raises(ValueError, match="per_sample_weights and batch_sizes must be None with pooling 'none'"):
        module(ids, offsets, torch.ones(10))
    with pytest.raises(ValueError, match="per_sample_weights and batch_sizes must be None with pooling 'none'"):
        module(ids, offsets, batch_sizes=[[2]] * 4)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype, dim", [(torch.float16, 128), (torch.float32, 3)], ids=str)
def test_compiles(dtype, dim, arch):
    """What a GPU would run for unpooled rows: nothing spills in a loop, aligned rows are loaded 16 bytes a lane."""
    from fbtriton.compile_only import compile_only, load_widths, resources

    module = make("cpu", rows=(1001, 1001, 1001), dim=dim, weights_dtype=dtype, optimizer=RowwiseAdagrad(0.1))
    with compile_only("cuda", arch) as kernels:
        output = module(torch.zeros(16000, dtype=torch.int64), torch.arange(9) * 2000)
        output.backward(torch.ones_like(output))
    by_name = {kernel.name: kernel for kernel in kernels}
    assert {"place_entries_kernel", "check_ids_kernel", "gather_kernel", "linearise_kernel"} <= set(by_name)
    assert all(resources(kernel).loop_spills == 0 for kernel in kernels)
    if dim == 128:
        assert load_widths(by_name["gather_kernel"])["LDG.E.128"] > 0
