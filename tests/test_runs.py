"""The integers between the kernels: keys, runs, pieces and buckets, exactly."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbtriton.backward.classify import classify, max_pieces
from fbtriton.backward.entries import EntryForm
from fbtriton.backward.linearise import linearise
from fbtriton.backward.transpose import transpose
from fbtriton.batch import BatchShape, place_bags
from fbtriton.config import EntryConfig, LineariseConfig, force_config
from fbtriton.layout import Bags, OperatorSpec
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
            if row != -1:
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


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    feature_tables=st.permutations([0, 1, 2, 1]),
    lengths=st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=4, max_size=4),
    hot=st.sampled_from([0.0, 0.6]),
    mean=st.booleans(),
    padding=st.sampled_from([0, 5]),
    offset_bits=st.sampled_from([32, 1]),
)
def test_transpose_and_classify(feature_tables, lengths, hot, mean, padding, offset_bits, device):
    spec = make_spec((6, 3, 50), (8, 1, 8), feature_tables, "mean" if mean else "sum")
    layout, batch_size, threshold, piece = spec.layout, 3, 5, 8
    batch = make_batch(
        [layout.rows[table] for table in feature_tables],
        torch.tensor(lengths),
        seed=7,
        weighted=True,
        pruned=0.2,
        hot=hot,
        padding=padding,
        device=device,
    )
    if batch.indices.numel() == 0:
        return
    grad_output = torch.zeros(batch_size, layout.columns[-1], device=device)
    seed_and_step = torch.tensor([1, 41], device=device)
    config = EntryConfig(block=8, programs_per_multiprocessor=2)
    bags = Bags(batch.indices, batch.offsets, batch.sample_weights)
    form = EntryForm(scaled=True, unit=1)
    with force_config(entry=config, linearise=LineariseConfig(block=8, ways=4, offset_bits=offset_bits)):
        shape = BatchShape.of(batch.offsets, (), spec)
        runs = transpose(bags=bags, shape=shape, grad_output=grad_output, form=form, spec=spec)
        pieces = classify(runs=runs, seed_and_step=seed_and_step, threshold=threshold, piece_length=piece, spec=spec)
    assert seed_and_step.tolist() == [1, 42]
    entries = expected_entries(spec, batch, batch_size)
    keys = sorted({entry[0] for entry in entries})
    num_runs = int(runs.num_runs)
    assert runs.run_keys[:num_runs].tolist() == keys

    starts = [next(i for i, entry in enumerate(entries) if entry[0] == key) for key in keys] + [len(entries)]
    assert runs.run_starts[: num_runs + 1].tolist() == starts
    offsets, scales = (values[: len(entries)] for values in read_entries(runs.entries, form))
    assert offsets.tolist() == expected_offsets(spec, entries, batch_size)
    expected = torch.tensor([float(batch.sample_weights[p]) / (n if mean else 1) for _, p, _, n in entries])
    assert torch.allclose(scales.cpu(), expected, rtol=2**-22, atol=0)

    lengths_of_runs = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    counts = [-(-n // piece) if n >= threshold else 0 for n in lengths_of_runs]
    assert sum(counts) <= max_pieces(batch.indices.numel(), threshold)
    if max_pieces(batch.indices.numel(), threshold):
        assert pieces.piece_starts[: num_runs + 1].diff().tolist() == counts
        owners = [run for run, count in enumerate(counts) for _ in range(count)]
        assert pieces.piece_runs[: len(owners)].tolist() == owners

    places = {}
    for table in range(3):
        for row in range(layout.rows[table]):
            offset = layout.weight_offsets[table] + row * layout.dims[table]
            places[layout.key_bases[table] + row] = (offset, layout.state_bases[table] + row)
    assert pieces.weight_offsets[:num_runs].tolist() == [places[key][0] for key in keys]
    assert pieces.state_rows[:num_runs].tolist() == [places[key][1] for key in keys]
    bounds = [sum(layout.rows[t] for b in layout.buckets[:i] for t in b.tables) for i in range(3)]
    assert pieces.bucket_runs.tolist() == [sum(key < bound for key in keys) for bound in bounds]


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
