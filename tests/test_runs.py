"""The integers between the kernels: keys, runs, pieces and buckets, exactly."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbtriton.backward.entries import EntryForm
from fbtriton.backward.linearise import linearise
from fbtriton.backward.runs import find_runs, most_pieces
from fbtriton.backward.sort import sort_pairs
from fbtriton.batch import BatchShape, place_bags
from fbtriton.config import LineariseConfig, LongRunConfig, RunsConfig, force_config
from fbtriton.layout import Bags
from fbtriton.spec import OperatorSpec
from fbtriton.testing import make_batch

pytestmark = pytest.mark.interpreter


def make_spec(rows, dims, feature_tables, pooling="sum"):
    tables = tuple(zip(rows, dims, strict=True))
    return OperatorSpec(tables, tuple(feature_tables), pooling, "float16", "float32", "sgd", False, "off")


def expected_entries(spec, batch, batch_size):
    """(key, position, bag, length of the bag) of every entry that trains, by plain Python."""
    layout, offsets, entries = spec.layout, batch.offsets.tolist(), []
    for bag in range(len(offsets) - 1):
        table = spec.feature_tables[bag // batch_size]
        for position in range(offsets[bag], offsets[bag + 1]):
            row = int(batch.indices[position])
            if row != -1 and layout.rows[table]:
                row = row if 0 <= row < layout.rows[table] else 0
                entries.append((layout.key_bases[table] + row, position, bag, offsets[bag + 1] - offsets[bag]))
    return sorted(entries)


def expected_offsets(spec, entries, batch_size):
    columns = spec.layout.columns
    return [bag % batch_size * columns[-1] + columns[bag // batch_size] for _, _, bag, _ in entries]


def read_entries(entries, form):
    """Offsets and scales, as `fbtriton.backward.entries` lays them out."""
    payload = entries.payload.long()
    if entries.scales is not None:
        return entries.offsets[payload], entries.scales[payload]
    if form.scaled:
        return (payload & 0xFFFFFFFF) * form.unit, (payload >> 32).int().view(torch.float32)
    return (payload & 0xFFFFFFFF if entries.payload.dtype == torch.int32 else payload) * form.unit, None


def find(spec, batch, long_run, device, runs=None, linearise_config=None, form=None):
    """Everything up to the tables of runs."""
    form = form or EntryForm(scaled=batch.sample_weights is not None or spec.mean, unit=1)
    batch_size = (batch.offsets.numel() - 1) // len(spec.feature_tables)
    seed_and_step = torch.tensor([1, 41], device=device)
    runs = runs or RunsConfig(block=8, programs_per_multiprocessor=2)
    with force_config(runs=runs, linearise=linearise_config or LineariseConfig(block=16, ways=4)):
        keys, entries = linearise(
            bags=Bags(batch.indices, batch.offsets, batch.sample_weights),
            shape=BatchShape.of(batch.offsets, (), spec),
            grad_output=torch.zeros(batch_size, spec.layout.columns[-1], device=device),
            form=form,
            spec=spec,
        )
        keys, payload = sort_pairs(keys, entries.payload, spec.layout.no_key.bit_length())
        tables = find_runs(
            keys=keys, seed_and_step=seed_and_step, long_run=long_run, spec=spec
        )  # fmt: skip
    assert seed_and_step.tolist() == [1, 42]
    return keys, entries._replace(payload=payload), tables


def check_tables(tables, keys_of_entries, num_slots, long_run, spec):
    """Against plain Python, from the sorted keys of the entries that train."""
    layout = spec.layout
    keys = sorted(set(keys_of_entries))
    starts = [keys_of_entries.index(key) for key in keys] + [len(keys_of_entries)]
    places = {}
    for table, (rows, dim) in enumerate(spec.tables):
        for row in range(rows):
            offset = layout.weight_offsets[table] + row * dim
            places[layout.key_bases[table] + row] = (offset // layout.row_unit, layout.state_bases[table] + row)
    runs = tables.runs
    assert runs.run_starts[: len(starts)].tolist() == starts
    assert runs.weight_offsets[: len(keys)].tolist() == [places[key][0] for key in keys]
    assert runs.state_rows[: len(keys)].tolist() == [places[key][1] for key in keys]

    long_runs, before, pieces = [], [], 0  # before: long runs and pieces before each run
    for run in range(len(keys)):
        before.append([run, len(long_runs), pieces])
        start, end = starts[run], starts[run + 1]
        if end - start >= long_run.threshold:
            long_runs.append((run, pieces))
            inside = range(start + long_run.threshold, end - long_run.threshold + 1)
            pieces += 1 + sum(slot % long_run.piece_length == 0 for slot in inside)
    before.append([len(keys), len(long_runs), pieces])
    columns = [column[: len(long_runs)].tolist() for column in tables.long_runs]
    assert list(zip(*columns, strict=True)) == long_runs
    assert len(keys) <= runs.state_rows.numel() and len(long_runs) <= tables.long_runs.runs.numel()
    assert pieces <= most_pieces(num_slots, layout.no_key, long_run)

    bounds = [sum(layout.rows[t] for b in layout.buckets[:i] for t in b.tables) for i in range(len(layout.buckets) + 1)]
    ranges = [before[sum(key < bound for key in keys)] for bound in bounds]
    assert tables.ranges[: 3 * len(ranges)].view(-1, 3).tolist() == ranges


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    feature_tables=st.permutations([0, 1, 2, 1]),
    lengths=st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=4, max_size=4),
    rows=st.sampled_from([(6, 3, 50), (1, 1, 1), (0, 2, 4)]),
    hot=st.sampled_from([0.0, 0.6]),
    pruned=st.sampled_from([0.0, 0.2, 1.0]),
    mean=st.booleans(),
    padding=st.sampled_from([0, 5]),
    offset_bits=st.sampled_from([32, 1]),
    long_run=st.sampled_from(
        [
            LongRunConfig(threshold=5, piece_length=8, fan_in=2, rows_per_step=1),
            LongRunConfig(threshold=1, piece_length=1, fan_in=3, rows_per_step=1),
            LongRunConfig(threshold=3, piece_length=3, fan_in=64, rows_per_step=1),
            LongRunConfig(threshold=5, piece_length=2, fan_in=2, rows_per_step=1),
        ]
    ),
)
def test_tables(feature_tables, lengths, rows, hot, pruned, mean, padding, offset_bits, long_run, device):
    spec = make_spec(rows, (8, 1, 8), feature_tables, "mean" if mean else "sum")
    batch = make_batch(
        [max(1, rows[table]) for table in feature_tables],
        torch.tensor(lengths),
        seed=7,
        weighted=True,
        pruned=pruned,
        hot=hot,
        padding=padding,
        device=device,
    )
    if batch.indices.numel() == 0:
        return
    form = EntryForm(scaled=True, unit=1)
    config = LineariseConfig(block=16, ways=4, offset_bits=offset_bits)
    keys, entries, tables = find(spec, batch, long_run, device, linearise_config=config, form=form)
    expected = expected_entries(spec, batch, 3)
    assert keys[: len(expected)].tolist() == [key for key, *_ in expected]
    offsets, scales = (values[: len(expected)] for values in read_entries(entries, form))
    assert offsets.tolist() == expected_offsets(spec, expected, 3)
    factors = torch.tensor([float(batch.sample_weights[p]) / (n if mean else 1) for _, p, _, n in expected])
    assert torch.allclose(scales.cpu(), factors, rtol=2**-22, atol=0)
    check_tables(tables, [key for key, *_ in expected], keys.numel(), long_run, spec)


@pytest.mark.parametrize("programs", [1, 3, 8])
@pytest.mark.parametrize(
    "run_lengths",
    [[64], [63, 1], [1] * 63, [4, 3, 5, 8, 9, 16, 17], [7, 8, 8, 8, 9, 24], [33, 31], [2, 40, 2, 40]],
    ids=lambda lengths: "-".join(map(str, lengths[:8])),
)
def test_runs_across_blocks_and_programs(run_lengths, programs, device):
    """Blocks of 8 keys: runs that end with a block, that fill blocks, and one of all entries; two buckets."""
    long_run = LongRunConfig(threshold=4, piece_length=8, fan_in=2, rows_per_step=1)
    spec = make_spec((40, 40), (4, 8), (0, 1))
    ids = torch.repeat_interleave(torch.arange(len(run_lengths)), torch.tensor(run_lengths))
    half = len(run_lengths) // 2
    first = int(sum(run_lengths[:half]))
    batch = make_batch((40, 40), torch.tensor([[first], [len(ids) - first]]), seed=0, device=device)
    batch = replace(batch, indices=ids.to(device))
    runs = RunsConfig(block=8, programs_per_multiprocessor=programs)
    keys, _, tables = find(spec, batch, long_run, device, runs=runs)
    expected = [key for key, *_ in expected_entries(spec, batch, 1)]
    check_tables(tables, expected, keys.numel(), long_run, spec)


@pytest.mark.parametrize("offset_bits", [32, 2])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[[1] * 40, [0] * 40], [[0] * 39 + [90], [2] * 40], [[7] * 4, [5] * 4], [[0, 0, 0], [0, 0, 0]]],
    ids=["one each", "one long bag", "blocks across bags", "all padding"],
)
def test_linearise(lengths, index_dtype, block, weighted, offset_bits, device):
    spec = make_spec((30, 9), (8, 4), (1, 0))
    batch_size = len(lengths[0])
    batch = make_batch(
        (9, 30), torch.tensor(lengths), seed=3, weighted=weighted, pruned=0.1, padding=6, index_dtype=index_dtype,
        offset_dtype=index_dtype, device=device,
    )  # fmt: skip
    form = EntryForm(scaled=weighted, unit=4)
    with force_config(linearise=LineariseConfig(block=block, ways=4, offset_bits=offset_bits)):
        keys, entries = linearise(
            bags=Bags(batch.indices, batch.offsets, batch.sample_weights),
            shape=BatchShape.of(batch.offsets, (), spec),
            grad_output=torch.zeros(batch_size, 12, device=device),
            form=form,
            spec=spec,
        )
    expected = expected_entries(spec, batch, batch_size)
    by_position = {position: key for key, position, *_ in expected}
    assert keys.tolist() == [by_position.get(i, spec.layout.no_key) for i in range(keys.numel())]
    assert keys.numel() % block == 0 and keys.numel() > batch.indices.numel()
    offsets, scales = read_entries(entries, form)
    positions = [position for _, position, *_ in expected]
    assert offsets[positions].tolist() == expected_offsets(spec, expected, batch_size)
    if weighted:
        assert torch.equal(scales[positions], batch.sample_weights[positions])
    narrow = offset_bits == 32
    assert entries.payload.dtype == (torch.int32 if weighted != narrow else torch.int64)


def test_layout_example():
    """The worked example of fbtriton.layout."""
    spec = OperatorSpec(((3, 4), (2, 1), (5, 4)), (0, 1, 2, 0), "sum", "float32", "float32", "sgd", False, "off")
    layout = spec.layout
    assert layout.weight_offsets == [0, 12, 16, 36]
    assert layout.state_bases == [0, 3, 5, 10]
    assert layout.columns == [0, 4, 5, 9, 13]
    assert [(b.dim, b.tables, b.features) for b in layout.buckets] == [(1, (1,), (1,)), (4, (0, 2), (0, 2, 3))]
    assert layout.key_bases == [2, 0, 5]
    assert OperatorSpec.from_json(spec.text) == spec


def test_vbe_example(device):
    """The worked example of fbtriton.layout.VbeLayout."""
    spec = OperatorSpec(((9, 4), (9, 2)), (0, 1), "sum", "float32", "float32", "sgd", False, "off")
    vbe = place_bags(torch.zeros(6, dtype=torch.int32, device=device), [2, 1, 1, 1], spec)
    assert vbe.first_bags.tolist() == [0, 3, 5]
    assert vbe.bag_features.tolist() == [0, 0, 0, 1, 1]
    assert vbe.output_offsets.tolist() == [0, 4, 10, 8, 14]
    assert vbe.bucket_bags.tolist() == [3, 4, 0, 1, 2]
    shape = BatchShape.of(torch.zeros(6), [2, 1, 1, 1], spec)
    assert (shape.samples, shape.output_shape, shape.num_bags) == ((3, 2), (16,), 5)
