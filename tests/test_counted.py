"""Small tables that are counted: forward and backward by products, and what the two paths share.

Left out: other routes, which are in test_operator.py.
"""

from dataclasses import replace

import pytest
import torch
from test_operator import FLOATS, Case, check

import fbtriton.backward
from fbtriton import SGD, Adam, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.config import HistogramConfig, force_config
from fbtriton.forward.routing import counted_tables, histogram_features, plan
from fbtriton.testing import reference_step, run_step

pytestmark = pytest.mark.interpreter
HISTOGRAM = HistogramConfig(
    min_length=0, ids=16, count_bags=2, pool_bags=16, max_repeats=64, grad_chunk=16, grad_bags=16, grad_columns=16
)
SMALL = Case(
    rows=(5, 40, 3), dims=(16, 20, 16), feature_tables=(1, 0, 2, 0),
    lengths=tuple(tuple((7 * sample + feature) % 5 for sample in range(40)) for feature in range(4)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def everything_small_is_counted():
    with force_config(histogram=HISTOGRAM):  # chunks of 16 bags: three for 40 samples
        yield


@pytest.mark.parametrize("optimizer", [SGD(0.1), RowwiseAdagrad(0.1), Adam(0.1)], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("weights_dtype, pooling", [(torch.float32, "mean"), (torch.float16, "sum")], ids=str)
def test_no_sort(optimizer, weights_dtype, pooling, device, monkeypatch):
    def fail(*_):
        raise AssertionError("there is nothing to sort")

    monkeypatch.setattr(fbtriton.backward, "sort_pairs", fail)
    check(replace(SMALL, optimizer=optimizer, weights_dtype=weights_dtype, pooling=pooling, steps=2), device)


@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_dtypes(output_dtype, device):
    check(replace(SMALL, output_dtype=output_dtype), device)


def test_beside_a_table_that_is_sorted(device):
    """The entries of counted features have no key there, and the step advances once."""
    case = replace(SMALL, rows=(5, 40, 300), steps=2)
    spec = case.build(device).spec
    assert [part.features for part in counted_tables(spec, (0, 1, 3))] == [(1, 3), (0,)]
    text = str(plan(spec, device, 2.0))
    assert "backward histogram: features 0, 1, 3" in text and "backward short_run: features 2:" in text
    check(case, device)


def test_a_table_with_an_uncounted_feature_is_sorted(device):
    """One feature of the shared table has long bags, the other short ones."""
    spec = replace(SMALL.build(device).spec, bag_size_hints=(9.0, 9.0, 9.0, 1.0))
    with force_config(histogram=replace(HISTOGRAM, min_length=5.0)):
        counted, _ = histogram_features(spec, 2.0, weighted=False, vbe=False)
    assert counted == (0, 1, 2)
    assert [part.features for part in counted_tables(spec, counted)] == [(2,), (0,)]


def test_frozen_table(device):
    case = replace(SMALL, optimizer=RowwiseAdagrad(0.1))
    module, batch, grad = case.build(device), case.batch(device), case.gradient(device)
    module.freeze_tables([0])
    before = [view.clone() for view in module.split_embedding_weights()]
    expected = reference_step(module, batch, grad)
    run_step(module, batch, grad)
    after = module.split_embedding_weights()
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
    torch.testing.assert_close(module.weights.double(), expected.weights.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_rows(value, device):
    """In the forward with the bags that hold the row, in the backward with the rows of the bag."""
    module = TableBatchedEmbeddingBags([Table(6, 16)], optimizer=SGD(0.1), device=device).init_uniform_(-1, 1)
    module.split_embedding_weights()[0][3] = value
    indices = torch.tensor([0, 1, 3, 2, 4, 4], device=device)
    offsets = torch.tensor([0, 2, 4, 6], device=device)
    output = module(indices, offsets)
    assert torch.isfinite(output).all(dim=1).tolist() == [True, False, True]
    grad = torch.ones(3, 16, device=device)
    grad[2] = value
    output.backward(grad)
    finite = torch.isfinite(module.split_embedding_weights()[0]).all(dim=1)
    assert finite.tolist() == [True, True, True, False, False, True]


@pytest.mark.parametrize("length", [255, 600])
def test_counts_of_many_ids(length, device):
    """Beside bags whose counts fit, in a chunk of their own and in the same one."""
    lengths = (tuple(length if sample == 20 else 2 for sample in range(33)),)
    check(Case(rows=(20,), dims=(16,), feature_tables=(0,), lengths=lengths, hot=1.0, pooling="mean"), device)


def test_bags_too_long_for_few_rows_are_gathered(device):
    """A hot row could fill its byte in most of them."""
    tables = [Table(2, 16), Table(100, 16)]
    with force_config(histogram=HistogramConfig()):
        spec = TableBatchedEmbeddingBags(tables, optimizer=SGD(0.1), device=device).spec
        for length, counted in ((100.0, (0, 1)), (500.0, (1,)), (1500.0, ())):
            assert histogram_features(spec, length, weighted=False, vbe=False)[0] == counted


def test_opcheck(device):
    case = replace(SMALL, optimizer=RowwiseAdagrad(0.1))
    module, batch = case.build(device), case.batch(device)
    arguments = (
        module.anchor, module.weights, module._states, module.hyperparameters, module.seed_and_step, None,
        batch.indices, batch.offsets, None, [], [], None, module.spec.text,
    )  # fmt: skip
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fbtriton.embedding_bags.default, arguments, test_utils=tests)
    *_, counts = torch.ops.fbtriton.embedding_bags(*arguments)
    assert counts.shape == (4, 40, 64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("rows, dim", [(1, 16), (7, 16), (17, 20), (100, 64)])
def test_forced_histogram(rows, dim, dtype, pooling, device):
    """Small tables of two dims by counting, and a larger one by gathering, in one batch."""
    case = Case(
        rows=(rows, 300, 5), dims=(dim, dim, 32), feature_tables=(2, 0, 1, 0), weights_dtype=dtype, pooling=pooling,
        lengths=((3, 0, 40), (20, 1, 0), (2, 2, 9), (0, 0, 17)), pruned=0.2, padding=3,
    )  # fmt: skip
    with force_config(histogram=HISTOGRAM):
        check(case, device)


@pytest.mark.parametrize("length", [254, 255, 256, 700])
def test_counts_that_do_not_fit_a_byte(length, device):
    case = Case(rows=(70,), dims=(16,), feature_tables=(0,), lengths=((5, length, 3),), hot=1.0)
    with force_config(histogram=replace(HISTOGRAM, ids=64)):
        check(case, device)


def test_histogram_is_chosen(device):
    """Where tables are small and bags long, by hint or by the mean; never with per-sample weights."""
    spec = TableBatchedEmbeddingBags([Table(50, 64), Table(5000, 64)], optimizer=SGD(0.1), device=device).spec
    with force_config(histogram=HistogramConfig()):
        assert histogram_features(spec, 100.0, weighted=False, vbe=False)[0] == (0,)
        assert histogram_features(spec, 5.0, weighted=False, vbe=False)[0] == ()
        assert histogram_features(spec, 100.0, weighted=True, vbe=False)[0] == ()
        assert histogram_features(spec, 100.0, weighted=False, vbe=True)[0] == ()
        hinted = replace(spec, bag_size_hints=(2.0, 100.0))
        assert histogram_features(hinted, 100.0, weighted=False, vbe=False)[0] == ()
        assert "forward histogram: features 0:" in str(plan(spec, device, 100.0))
        assert "forward gather: features 1:" in str(plan(spec, device, 100.0))
