"""Bad input: the exact error or the documented repair; the caller's tensors and everything outside stay as they are."""

import re
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.config import INTERPRET, GatherConfig, HistogramConfig, force_config, kernels_on_cpu

GUARD = 64  # elements on both sides of the weights that nothing may touch


def make(device, **options):
    """Two small tables, whose weights lie between guards."""
    torch.manual_seed(0)
    options = {"optimizer": SGD(1.0), "device": device} | options
    module = TableBatchedEmbeddingBags([Table(4, 2, "a"), Table(3, 2, "b")], **options)
    memory = torch.full((module.weights.numel() + 2 * GUARD,), 7.0, device=device, dtype=module.weights.dtype)
    module.weights = memory[GUARD:-GUARD]
    with torch.no_grad():
        module.split_embedding_weights()[0].copy_(torch.arange(8.0).view(4, 2))
        module.split_embedding_weights()[1].copy_(torch.arange(100.0, 106.0).view(3, 2))
    return module


def run(module, indices, offsets, weights=None):
    """Forward and backward with a gradient of ones; the inputs must come out as they went in."""
    device = module.weights.device
    indices = torch.tensor(indices, dtype=torch.int64, device=device)
    offsets = torch.tensor(offsets, device=device)
    given = indices.clone(), offsets.clone()
    output = module(indices, offsets, weights)
    output.backward(torch.ones_like(output))
    assert torch.equal(indices, given[0]) and torch.equal(offsets, given[1])
    check_guards(module.weights)
    return output.detach().cpu()


def check_guards(weights):
    memory = weights if weights._base is None else weights._base
    if memory.numel() == weights.numel() + 2 * GUARD:
        assert bool((memory[:GUARD] == 7).all()) and bool((memory[-GUARD:] == 7).all()), "written outside the weights"


def rows_changed(module, before):
    views = zip(module.split_embedding_weights(), before, strict=True)
    return [(view != old).any(dim=1).nonzero().flatten().tolist() for view, old in views]


def snapshot(module):
    return [view.clone() for view in module.split_embedding_weights()]


GOOD = dict(indices=torch.tensor([0, 1]), offsets=torch.tensor([0, 1, 2]))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(indices=torch.tensor([0.0, 1.0])), "indices must be int32 or int64, got torch.float32"),
        (dict(offsets=torch.tensor([0, 1, 2], dtype=torch.int16)), "offsets must be int32 or int64, got torch.int16"),
        (dict(indices=torch.tensor([[0, 1]])), "indices must have one dimension, got shape [1, 2]"),
        (
            dict(offsets=torch.tensor([0, 1, 2, 2])),
            "offsets must have F * B + 1 elements with F = 2 features, got 4",
        ),
        (
            dict(offsets=torch.tensor([], dtype=torch.int64)),
            "offsets must have F * B + 1 elements with F = 2 features, got 0",
        ),
        (dict(indices=torch.zeros(2, dtype=torch.int64, device="meta")), "indices must be on cpu like the weights"),
        (
            dict(indices=torch.zeros(1, dtype=torch.int64).expand(2**31)),
            "indices must have at most 2146435072 elements, got 2147483648",
        ),
        (
            dict(per_sample_weights=torch.ones(3)),
            "per_sample_weights must have the shape of indices, [2], got [3]",
        ),
        (
            dict(per_sample_weights=torch.ones(2, dtype=torch.int64)),
            "per_sample_weights must be of a floating-point dtype, got torch.int64",
        ),
        (
            dict(per_sample_weights=torch.ones(2, device="meta")),
            "per_sample_weights must be on cpu like indices, got meta",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_tensors(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make("cpu")(**(GOOD | change))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(pooling="max"), "pooling must be one of sum, mean, none, got 'max'"),
        (dict(weights_dtype=torch.float64), "weights_dtype must be one of torch.float32"),
        (dict(output_dtype=torch.int8), "output_dtype must be one of torch.float32"),
        (dict(bounds_check="loud"), "bounds_check must be one of off, ignore, warning, fatal, got 'loud'"),
        (dict(feature_table_map=[0, 2]), "feature_table_map[1] must be a table number in [0, 2), got 2"),
        (dict(feature_table_map=[0, -1]), "feature_table_map[1] must be a table number in [0, 2), got -1"),
        (dict(feature_table_map=[1, 1]), "feature_table_map must use every table, got [1, 1] without table 0"),
        (dict(bag_size_hints=[3.0]), "bag_size_hints must have one entry for each of 2 features, got 1"),
        (dict(bag_size_hints=[3.0, -1]), "bag_size_hints[1] must be a finite number >= 0, got -1"),
        (dict(optimizer="sgd"), "optimizer must be one of SGD, LarsSGD, Adagrad, RowwiseAdagrad, Adam, "),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make("cpu", **options)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Table(3, 0, "t"), "dim of table 't' must be an integer >= 1, got 0"),
        (lambda: Table(-1, 4), "rows of table None must be an integer >= 0, got -1"),
        (lambda: Table(3, 4.0), "dim of table None must be an integer >= 1, got 4.0"),
        (lambda: SGD(-0.1), "lr must be a finite number >= 0, got -0.1"),
        (lambda: RowwiseAdagrad(0.1, eps=float("nan")), "eps must be a finite number >= 0, got nan"),
        (lambda: TableBatchedEmbeddingBags([], optimizer=SGD(0.1)), "tables must be a non-empty sequence of Table"),
        (lambda: setattr(make("cpu"), "learning_rate", float("inf")), "learning_rate must be a finite number >= 0"),
    ],
    ids=["dim 0", "rows -1", "dim 4.0", "lr -0.1", "eps nan", "no tables", "learning rate inf"],
)
def test_wrong_values(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    "batch_sizes, message",
    [
        ([[2]], "batch_sizes must have a list of batch sizes, one for each rank, for each of 2 features, got [[2]]"),
        ([[1], [1, 0]], "batch_sizes must have a list of batch sizes, one for each rank, for each of 2 features"),
        ([[], []], "batch_sizes must have a list of batch sizes, one for each rank, for each of 2 features"),
        ([[3], [-1]], "batch_sizes must not be negative, got [[3], [-1]]"),
        ([[2], [1]], "offsets must have 4 elements, one more than the sum of batch_sizes, got 3"),
    ],
    ids=str,
)
def test_wrong_batch_sizes(batch_sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make("cpu")(**GOOD, batch_sizes=batch_sizes)


def test_weights_of_another_dtype_are_refused():
    module = make("cpu")
    module.weights = module.weights.half()
    with pytest.raises(ValueError, match="weights must be torch.float32, as constructed, got torch.float16"):
        module(**GOOD)


# Bags of one sample: feature 0 has table a (4 rows), feature 1 table b (3 rows).
BAD_IDS = [
    ("too large", [1, 4, 2], [0, 2, 3], [[0, 1], [2]], 1, (0, 0, 4)),
    ("negative", [1, -7, 2], [0, 2, 3], [[0, 1], [2]], 1, (0, 0, -7)),
    ("second feature", [3, 3], [0, 1, 2], [[3], [0]], 1, (1, 0, 3)),
    ("several", [9, 8, 7], [0, 2, 3], [[0, 0], [0]], 3, (0, 0, 9)),
    ("huge", [2**40, 1], [0, 1, 2], [[0], [1]], 1, (0, 0, 2**40)),
]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("mode", ["ignore", "warning"])
@pytest.mark.parametrize("name, indices, offsets, read, count, first", BAD_IDS, ids=[case[0] for case in BAD_IDS])
def test_bad_ids_read_and_train_row_0(name, indices, offsets, read, count, first, mode, fused, any_device):
    module = make(any_device, bounds_check=mode, fused_bounds_check=fused)
    before = snapshot(module)
    output = run(module, indices, offsets)
    tables = [view.cpu() for view in before]
    assert torch.equal(output[0], torch.cat([tables[f][read[f]].sum(dim=0) for f in range(2)]))
    assert rows_changed(module, before) == [sorted(set(rows)) for rows in read]
    report = module.bounds_report()
    assert (report.bad_ids, report.first_bad_id) == ((count, first) if mode == "warning" else (0, None))
    assert report.bad_offsets == 0


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_report_adds_up_and_keeps_the_first(fused, any_device):
    module = make(any_device, fused_bounds_check=fused)
    assert str(module.bounds_report()) == "no id or offset was out of bounds"
    run(module, [4, 0], [0, 1, 2])
    run(module, [0, 5], [0, 1, 2])
    report = module.bounds_report()
    assert (report.bad_ids, report.first_bad_id) == (2, (0, 0, 4))
    assert str(report) == (
        "2 ids were out of bounds (each was read as row 0); 0 offsets were repaired;"
        " first bad id: feature 0, sample 0, id 4"
    )
    module.clear_bounds_report()
    assert module.bounds_report().bad_ids == 0


def test_pruned_ids_add_and_train_nothing_but_count_in_a_mean(any_device):
    module = make(any_device, pooling="mean")
    before = snapshot(module)
    output = run(module, [-1, 2, -1], [0, 2, 3])
    assert torch.equal(output[0], torch.tensor([4.0 / 2, 5.0 / 2, 0, 0]))
    assert rows_changed(module, before) == [[2], []]
    assert torch.equal(module.split_embedding_weights()[0][2].cpu(), torch.tensor([4.0 - 0.5, 5.0 - 0.5]))
    assert module.bounds_report().bad_ids == 0


BAD_OFFSETS = [
    ("decreasing", [0, 3, 1, 2, 4], [0, 3, 3, 3, 4], 2),
    ("negative", [0, -2, 1, 2, 4], [0, 0, 1, 2, 4], 1),
    ("past the end", [0, 1, 2, 9, 9], [0, 1, 2, 4, 4], 2),
    ("not from 0", [2, 3, 3, 3, 4], [0, 3, 3, 3, 4], 1),
    ("first too large", [9, 1, 2, 3, 4], [0, 1, 2, 3, 4], 1),
    ("huge", [0, 2**40, 2, 3, 4], [0, 4, 4, 4, 4], 3),
    ("a peak", [0, 4, 1, 2, 3], [0, 4, 4, 4, 4], 3),
]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("mode", ["ignore", "warning"])
@pytest.mark.parametrize("name, given, repaired, count", BAD_OFFSETS, ids=[case[0] for case in BAD_OFFSETS])
def test_bad_offsets_are_repaired(name, given, repaired, count, mode, fused, any_device):
    """Two samples; the repair gives the same step as the repaired offsets."""
    results = []
    for offsets in (given, repaired):
        module = make(any_device, bounds_check=mode, fused_bounds_check=fused)
        output = run(module, [0, 1, 2, 1], offsets)
        results.append((output, module.weights.clone(), module.bounds_report().bad_offsets))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[1][2] == 0
    assert results[0][2] == (count if mode == "warning" else 0)


def test_padding_belongs_to_no_bag(any_device):
    module = make(any_device)
    before = snapshot(module)
    output = run(module, [1, 2, 77, -5, 3], [0, 1, 2])
    assert torch.equal(output[0], torch.tensor([2.0, 3.0, 104.0, 105.0]))
    assert rows_changed(module, before) == [[1], [2]]
    assert module.bounds_report().bad_ids == 0


@pytest.mark.parametrize("name, given, repaired, count", BAD_OFFSETS, ids=[case[0] for case in BAD_OFFSETS])
def test_off_stays_inside_the_tensors(name, given, repaired, count, any_device):
    """Nothing is promised about the values, but the neighbours of the weights stay as they are."""
    module = make(any_device, bounds_check="off")
    assert module.weights._base is not None, "no guards"
    run(module, [0, 99, -3, 1], given)


def test_fatal_raises_on_the_cpu():
    module = make("cpu", bounds_check="fatal")
    before = module.weights.clone()
    with pytest.raises(ValueError, match=re.escape("indices of feature 1 must be in [0, 3) or -1, got 5 in sample 0")):
        run(module, [0, 5], [0, 1, 2])
    message = "offsets must start at 0, not decrease and stay within the 2 indices, got offsets[1] = 7"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(module, [0, 1], [0, 7, 2])
    assert torch.equal(module.weights, before)
    run(module, [0, -1], [0, 1, 2])


def test_table_without_rows(any_device):
    """A shard may have no rows: every id is out of range, reads zero and trains nothing."""
    module = TableBatchedEmbeddingBags([Table(0, 4), Table(2, 4)], optimizer=SGD(1.0), device=any_device)
    output = run(module, [0, 1], [0, 1, 2])
    assert torch.equal(output, torch.zeros(1, 8))
    assert module.bounds_report().bad_ids == 1
    assert rows_changed(module, [torch.zeros_like(view) for view in module.split_embedding_weights()]) == [[], [1]]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_bad_ids_with_a_batch_size_for_each_feature(fused, any_device):
    """Feature 0 has two samples, feature 1 three; the first bad id is the second of feature 1's last sample."""
    module = make(any_device, fused_bounds_check=fused)
    indices = torch.tensor([0, 1, 0, 1, 2, 9], device=any_device)
    offsets = torch.tensor([0, 1, 2, 3, 4, 6], device=any_device)
    output = module(indices, offsets, batch_sizes=[[2], [3]])
    assert output[-2:].tolist() == [104.0 + 100.0, 105.0 + 101.0]
    report = module.bounds_report()
    assert (report.bad_ids, report.first_bad_id) == (1, (1, 2, 9))


@st.composite
def bad_batches(draw):
    """Two features with three samples each; any offsets, any ids."""
    size = draw(st.integers(0, 12))
    anything = st.one_of(st.integers(-2, size + 2), st.sampled_from([-(2**40), 2**31, 2**40]))
    offsets = draw(st.one_of(st.lists(anything, min_size=7, max_size=7), st.permutations([0, 1, 2, 3, 4, 5, 6])))
    ids = st.one_of(st.integers(-2, 5), st.sampled_from([-(2**40), 2**31, 2**32 + 1]))
    return draw(st.lists(ids, min_size=size, max_size=size)), offsets


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(batch=bad_batches(), pooling=st.sampled_from(["sum", "mean"]), bags=st.sampled_from([1, 2]))
def test_fused_and_separate_checks_agree(batch, pooling, bags, any_device):
    """Bitwise: output, tables and the whole report, from the kernels and from the reference."""
    results = []
    config = GatherConfig(bags_per_program=bags, rows_per_bag=2, num_warps=1)
    for fused in (True, False):
        module = make(any_device, pooling=pooling, fused_bounds_check=fused)
        with force_config(gather=config):
            output = run(module, *batch)
        results.append((output, module.weights.cpu(), module.bounds_report()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    reference = make("cpu", pooling=pooling)
    token = kernels_on_cpu.set(False)
    run(reference, *batch)
    kernels_on_cpu.reset(token)
    assert results[0][2] == reference.bounds_report()


@pytest.mark.interpreter
@pytest.mark.parametrize("name, given, repaired, count", BAD_OFFSETS, ids=[case[0] for case in BAD_OFFSETS])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_counted_tables_are_checked_alike(name, given, repaired, count, pooling, device):
    """Small tables on the way of the histogram, with bad ids too: fused, separate and reference find the same."""
    results = []
    indices = torch.tensor([0, 9, -1, -5], device=device)
    for fused, place in ((True, device), (False, device), (True, torch.device("cpu"))):
        torch.manual_seed(0)
        module = TableBatchedEmbeddingBags(
            [Table(4, 16), Table(3, 16)], optimizer=SGD(1.0), pooling=pooling, fused_bounds_check=fused, device=place
        )
        with torch.no_grad():
            module.weights.copy_(torch.arange(module.weights.numel()) / 8)
        token = kernels_on_cpu.set(kernels_on_cpu.get() and len(results) < 2)
        with force_config(histogram=HistogramConfig(min_length=0, ids=16, count_bags=2, pool_bags=16)):
            output = module(indices.to(place), torch.tensor(given, device=place))
            output.sum().backward()
        kernels_on_cpu.reset(token)
        results.append((output.detach().cpu(), module.weights.cpu(), module.bounds_report()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][0], results[2][0])
    assert results[0][2] == results[1][2] == results[2][2]
    assert results[0][2].bad_offsets == count


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRET, reason="only the interpreter calls what a test puts in a function's place")
@pytest.mark.parametrize("dim, columns", [(4, 2048), (9, 2048), (12, 2048), (1, 2048)])
def test_good_ids_are_not_looked_at_again(dim, columns, monkeypatch):
    """Also where a tile has columns that the rows have not."""

    def fail(*_):
        raise AssertionError("no id is bad")

    monkeypatch.setattr(sys.modules["fbtriton.forward.gather"], "report_ids_of_bags", fail)
    module = TableBatchedEmbeddingBags([Table(5, dim)], optimizer=SGD(0.1), device="cpu").init_uniform_(-1, 1)
    with force_config(gather=GatherConfig(2, 2, 1, columns=columns)):
        module(torch.tensor([0, -1, 4, 2, 1]), torch.tensor([0, 3, 5]))
        with pytest.raises(Exception, match="no id is bad"):
            module(torch.tensor([0, -1, 5, 2, 1]), torch.tensor([0, 3, 5]))
