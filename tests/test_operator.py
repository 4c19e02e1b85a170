"""The kernels against the reference: forward and backward, every dtype, pooling, dim and route."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbtriton import SGD, Adagrad, Adam, PartialRowwiseAdam, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.batch import Segments, place_bags, reference_placement, segments_of
from fbtriton.config import (
    EntryConfig,
    GatherConfig,
    LineariseConfig,
    LongRunConfig,
    RunsConfig,
    ShortRunConfig,
    force_config,
)
from fbtriton.layout import VbeLayout
from fbtriton.optim import Optimizer
from fbtriton.testing import assert_same_step, make_batch, reference_step, run_step

pytestmark = pytest.mark.interpreter
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
BY_NAME = {"sgd": SGD(0.5), "rowwise_adagrad": RowwiseAdagrad(0.5, initial_accumulator=0.125)}
# Optimizers and numbers with which a small error of a gradient stays small, however small the gradient is; others
# divide it by its own size. tests/test_optimizers.py has those too.
SMOOTH = [
    RowwiseAdagrad(0.5, initial_accumulator=0.125, weight_decay=0.25, weight_decay_mode="l2", max_norm=1.0),
    Adagrad(0.5, initial_accumulator=0.125),
    Adam(0.25, eps=0.125, weight_decay=0.25),
    PartialRowwiseAdam(0.25, eps=0.125, weight_decay=0.25),
]


@dataclass(frozen=True)
class Case:
    """Left out: pooling "none", which is in test_sequence.py."""

    rows: tuple[int, ...] = (9, 5)
    dims: tuple[int, ...] = (4, 4)
    feature_tables: tuple[int, ...] = (0, 1)
    lengths: tuple[tuple[int, ...], ...] = ((3, 0, 2), (1, 4, 0))  # [F][samples]
    batch_sizes: tuple[int, ...] = ()  # [F * ranks], feature-major; empty = all features have one batch size
    optimizer: str | Optimizer = "rowwise_adagrad"
    pooling: str = "sum"
    weighted: bool = False
    sample_grad: bool = False
    weights_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    stochastic_rounding: bool = True
    bounds_check: str = "warning"
    fused_bounds_check: bool = True
    pruned: float = 0.0
    padding: int = 0
    hot: float = 0.0
    steps: int = 1

    def build(self, device, seed=0):
        torch.manual_seed(seed)
        module = TableBatchedEmbeddingBags(
            [Table(rows, dim) for rows, dim in zip(self.rows, self.dims, strict=True)],
            optimizer=BY_NAME.get(self.optimizer, self.optimizer),
            feature_table_map=self.feature_tables,
            pooling=self.pooling,
            weights_dtype=self.weights_dtype,
            output_dtype=self.output_dtype,
            stochastic_rounding=self.stochastic_rounding,
            bounds_check=self.bounds_check,
            fused_bounds_check=self.fused_bounds_check,
            device=device,
        )
        return module.init_uniform_(-1, 1)

    def batch(self, device, seed=0):
        batch = make_batch(
            [self.rows[table] for table in self.feature_tables],
            [torch.tensor(lengths, dtype=torch.int64) for lengths in self.lengths],
            seed=seed,
            weighted=self.weighted,
            pruned=self.pruned,
            padding=self.padding,
            hot=self.hot,
            index_dtype=self.index_dtype,
            offset_dtype=self.offset_dtype,
            device=device,
        )
        return replace(batch, batch_sizes=self.batch_sizes)

    def gradient(self, device, seed=0):
        generator = torch.Generator().manual_seed(seed)
        dims = [self.dims[table] for table in self.feature_tables]
        shape = (len(self.lengths[0]), sum(dims))
        if self.batch_sizes:
            shape = (sum(len(lengths) * dim for lengths, dim in zip(self.lengths, dims, strict=True)),)
        grad = torch.rand(shape, generator=generator) * 2 - 1
        return grad.to(device, self.output_dtype)

    @property
    def terms(self):
        return sum(map(sum, self.lengths))


def check(case, device, seed=0):
    """Some steps of the module, each against the oracle from the same state; untouched rows must not change."""
    module = case.build(device, seed)
    for step in range(case.steps):
        batch, grad = case.batch(device, seed + step), case.gradient(device, seed + step)
        before = tables_of(module)
        expected = reference_step(module, batch, grad, case.sample_grad)
        actual = run_step(module, batch, grad, case.sample_grad)
        assert_same_step(actual, expected, terms=case.terms, module=module)
        check_untouched(case, module, batch, before)
    trains = case.terms + case.padding and any(case.lengths)
    assert module.seed_and_step[1] == (case.steps if trains else 0)
    assert module.bounds_report().bad_ids == 0
    return actual


def check_untouched(case, module, batch, before):
    touched = [set() for _ in case.rows]
    offsets, first = batch.offsets.tolist(), 0
    for table, lengths in zip(case.feature_tables, case.lengths, strict=True):
        ids = batch.indices[offsets[first] : offsets[first + len(lengths)]]
        first += len(lengths)
        touched[table].update(ids.tolist())
    for table, views in enumerate(tables_of(module)):
        rest = [row for row in range(case.rows[table]) if row not in touched[table]]
        for view, old in zip(views, before[table], strict=True):
            assert torch.equal(view[rest], old[rest]), f"untouched rows of table {table} changed"


def tables_of(module):
    """For each table copies of its rows and of their states."""
    views = zip(module.split_embedding_weights(), module.split_optimizer_states(), strict=True)
    return [[view.cpu().clone() for view in (rows, *states)] for rows, states in views]


ON_GPU = torch.cuda.is_available()


def options(*values):
    """What a kernel is compiled for. A GPU takes the first only, or it would compile for nearly every example; the
    tests below go through all of them. The interpreter compiles nothing and takes any."""
    return st.sampled_from(values[:1] if ON_GPU else values)


@st.composite
def cases(draw):
    """Tiny shapes that reach every branch: the interpreter takes about a millisecond for each step of a program."""
    num_tables = draw(st.integers(1, 3))
    extra = draw(st.lists(st.integers(0, num_tables - 1), max_size=2))
    feature_tables = tuple(draw(st.permutations([*range(num_tables), *extra])))
    bag = st.integers(0, 6)
    batch_sizes = ()
    samples = [draw(st.integers(0, 3))] * len(feature_tables)
    if draw(st.booleans()):
        ranks = draw(st.integers(1, 3))
        batch_sizes = tuple(draw(st.integers(0, 2)) for _ in range(len(feature_tables) * ranks))
        samples = [sum(batch_sizes[f * ranks : (f + 1) * ranks]) for f in range(len(feature_tables))]
    lengths = tuple(tuple(draw(bag) for _ in range(count)) for count in samples)
    weighted = draw(st.booleans())
    dims = st.sampled_from([3, 64] if ON_GPU else [1, 2, 3, 4, 5, 8, 12, 20, 64])
    return Case(
        rows=tuple(draw(st.integers(1, 40)) for _ in range(num_tables)),
        dims=tuple(draw(dims) for _ in range(num_tables)),
        feature_tables=feature_tables,
        lengths=lengths,
        batch_sizes=batch_sizes,
        optimizer=draw(options("rowwise_adagrad", "sgd", *SMOOTH)),
        pooling=draw(options("sum", "mean")),
        weighted=weighted,
        sample_grad=weighted and draw(st.booleans()),
        weights_dtype=draw(options(torch.float16, torch.float32, torch.bfloat16)),
        output_dtype=draw(options(*FLOATS)),
        index_dtype=draw(options(*INTEGERS)),
        offset_dtype=draw(options(*INTEGERS)),
        stochastic_rounding=draw(options(True, False)),
        bounds_check=draw(options("warning", "ignore", "off")),
        fused_bounds_check=draw(options(True, False)),
        pruned=draw(st.sampled_from([0.0, 0.3])),
        padding=draw(st.sampled_from([0, 3])),
        hot=draw(st.sampled_from([0.0, 0.8])),
    )


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases(), seed=st.integers(0, 1000))
def test_operator(case, seed, device):
    offset_bits, unroll = (32 if seed % 2 else 1), 1 + seed % 3
    with force_config(
        linearise=LineariseConfig(block=16, ways=4, offset_bits=offset_bits),
        runs=RunsConfig(block=8, programs_per_multiprocessor=2),
        short_run=ShortRunConfig(runs_per_tile=2, num_warps=1, unroll=unroll, programs_per_multiprocessor=4),
        long_run=LongRunConfig(
            threshold=4, piece_length=6, fan_in=2, rows_per_step=2, unroll=unroll, programs_per_multiprocessor=2
        ),
    ):
        check(case, device, seed)


@pytest.mark.parametrize("weights_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("output_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_dtypes(weights_dtype, output_dtype, weighted, pooling, device):
    case = Case(
        weights_dtype=weights_dtype, output_dtype=output_dtype, weighted=weighted, sample_grad=weighted, pooling=pooling
    )
    check(replace(case, steps=2), device)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 6, 7, 8, 10, 12, 96, 128, 200, 1024, 2056])
def test_dims(dim, device):
    case = Case(rows=(3, 7), dims=(1, dim), weights_dtype=torch.float16, hot=0.5, lengths=((3, 0, 2), (9, 1, 0)))
    with force_config(long_run=LongRunConfig(threshold=4, piece_length=8, rows_per_step=4)):
        check(case, device)


@pytest.mark.parametrize(
    "lengths", [((0, 0), (0, 0)), ((), ()), ((1,), (0,)), ((0, 0, 5), (0, 0, 0))], ids=lambda lengths: f"L{lengths}"
)
@pytest.mark.parametrize("padding", [0, 4])
def test_empty(lengths, padding, device):
    check(Case(lengths=lengths, padding=padding, weighted=True, sample_grad=True), device)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("run_length", [1, 2, 7, 8, 9, 16, 22, 23, 24, 38, 39, 40, 54, 55, 100])
def test_run_lengths_around_the_threshold(run_length, optimizer, device):
    """One row that occurs run_length times, between runs of one entry, with threshold 8 and pieces of 16: another piece
    from 23, 39 and 55 on."""
    case = Case(rows=(20,), dims=(8,), feature_tables=(0,), lengths=((run_length + 2,),), optimizer=optimizer)
    module, grad = case.build(device), case.gradient(device)
    batch = case.batch(device)
    indices = torch.tensor([3] + [5] * run_length + [11], device=device)
    batch = replace(batch, indices=indices)
    with force_config(long_run=LongRunConfig(threshold=8, piece_length=16, rows_per_step=4)):
        expected = reference_step(module, batch, grad)
        assert_same_step(run_step(module, batch, grad), expected, terms=run_length, module=module)


def test_shared_tables_are_updated_once(device):
    """A row hit by three features and several times by each gets one step with the exact summed gradient."""
    case = Case(rows=(4, 6), dims=(8, 8), feature_tables=(0, 1, 0, 0), lengths=((5, 5),) * 4)
    check(case, device)


GATHERS = [
    GatherConfig(bags_per_program=1, rows_per_bag=1, num_warps=1),
    GatherConfig(bags_per_program=1, rows_per_bag=8, num_warps=4, unroll=2),
    GatherConfig(bags_per_program=2, rows_per_bag=1, num_warps=1, unroll=4),
    GatherConfig(bags_per_program=4, rows_per_bag=2, num_warps=2),
    GatherConfig(bags_per_program=16, rows_per_bag=1, num_warps=1, columns=2),
]


@pytest.mark.parametrize("config", GATHERS, ids=str)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("vbe", [False, True], ids=["", "vbe"])
def test_forced_gather(config, pooling, vbe, device):
    """Programs with bags left over; with batch sizes for each feature a program's bags lie in different features."""
    options = {"pooling": pooling, "weighted": True, "sample_grad": True, "pruned": 0.2, "padding": 3}
    case = vbe_case(**options) if vbe else Case(lengths=((3, 0, 2, 1, 9), (1, 4, 0, 0, 1)), **options)
    with force_config(gather=config):
        check(case, device)


@pytest.mark.parametrize("dim, columns", [(1, 2048), (6, 4), (20, 8), (128, 32), (96, 32), (200, 128)])
def test_forced_gather_of_dims(dim, columns, device):
    with force_config(gather=GatherConfig(bags_per_program=4, rows_per_bag=2, num_warps=2, columns=columns)):
        check(Case(rows=(3, 7), dims=(1, dim), weights_dtype=torch.float16, lengths=((3, 0, 2), (9, 1, 0))), device)


@pytest.mark.parametrize("runs_per_tile", [1, 4, 16])
def test_forced_short_run(runs_per_tile, device):
    with force_config(short_run=ShortRunConfig(runs_per_tile=runs_per_tile, num_warps=1)):
        check(Case(rows=(30, 30), lengths=((9, 9), (9, 9))), device)


def test_everything_long(device):
    with force_config(long_run=LongRunConfig(threshold=1, piece_length=1, rows_per_step=1)):
        check(Case(weighted=True, pooling="mean", hot=0.5), device)


@pytest.mark.parametrize("fan_in", [2, 3, 64])
def test_levels_of_the_tree(fan_in, device):
    """Runs of 1 to 50 pieces in two buckets: with fan-in 2, up to five levels below the last."""
    case = Case(rows=(2, 4), dims=(8, 12), lengths=((100,), (37,)), hot=0.9)
    long_run = LongRunConfig(threshold=2, piece_length=2, fan_in=fan_in, rows_per_step=2)
    with force_config(long_run=long_run):
        check(case, device)


def test_everything_pruned(device):
    check(Case(pruned=1.0, weighted=True, sample_grad=True), device)


def test_result_does_not_depend_on_the_grid(device, monkeypatch):
    """Bitwise: fixed grids only hand out work."""
    monkeypatch.setattr("fbtriton.launch.LEAST_PROGRAMS", 0)  # of each bucket
    case = Case(rows=(30, 5), dims=(12, 8), lengths=((20, 9), (30, 2)), hot=0.4, weights_dtype=torch.float16)
    results = []
    for programs in (1, 4, 16):
        forced = force_config(
            entry=EntryConfig(block=16, programs_per_multiprocessor=programs),
            linearise=LineariseConfig(block=8 * programs, ways=4),
            runs=RunsConfig(block=8, programs_per_multiprocessor=programs),
            short_run=ShortRunConfig(runs_per_tile=2, num_warps=1, programs_per_multiprocessor=programs),
            long_run=LongRunConfig(
                threshold=4, piece_length=4, fan_in=2, rows_per_step=2, programs_per_multiprocessor=programs
            ),
        )
        monkeypatch.setattr("fbtriton.backward.long_run.GROUPS_OF_A_MULTIPROCESSOR", programs)
        with forced:
            results.append(check(case, device))
    for other in results[1:]:
        assert torch.equal(results[0].weights, other.weights)
        assert torch.equal(results[0].states[0], other.states[0])


@pytest.mark.parametrize("kind", ["expanded", "rows apart", "transposed", "columns apart", "unaligned"])
def test_gradient_strides(kind, device):
    case = Case()
    module, batch = case.build(device), case.batch(device)
    dense = case.gradient(device)
    rows, columns = dense.shape
    grad = {
        "expanded": lambda: torch.full((1, 1), 0.25, device=device).expand(rows, columns),
        "rows apart": lambda: torch.cat([dense, dense], dim=1)[:, :columns],
        "transposed": lambda: dense.t().contiguous().t(),
        "columns apart": lambda: torch.stack([dense, dense], dim=2)[:, :, 0],
        "unaligned": lambda: torch.cat([dense.flatten()[:1], dense.flatten()])[1:].view(rows, columns),
    }[kind]()
    expected = reference_step(module, batch, grad.contiguous())
    assert_same_step(run_step(module, batch, grad), expected, terms=case.terms, module=module)


def test_nan_gradient_reaches_only_its_rows(device):
    case = Case(rows=(12, 9), lengths=((2, 3), (1, 1)))
    module, batch, grad = case.build(device), case.batch(device), case.gradient(device)
    batch.indices[:] = torch.arange(batch.indices.numel(), device=device)  # every row once
    grad[0] = float("nan")
    run_step(module, batch, grad)
    bad = [torch.isnan(view).any(dim=1).nonzero().flatten().tolist() for view in module.split_embedding_weights()]
    assert bad == [[0, 1], [5]]
    assert torch.isnan(module.weights).sum() == 3 * 4


def test_state_of_another_step_is_not_shared(device):
    """Ten steps of row-wise Adagrad, each from the state the last one left."""
    check(replace(Case(), steps=10), device)


def vbe_case(**options):
    return Case(
        rows=(9, 5, 7), dims=(4, 8, 4), feature_tables=(0, 1, 2, 0),
        lengths=((3, 0, 2), (4,), (), (1, 5)), batch_sizes=(2, 1, 0, 1, 0, 0, 1, 1), **options,
    )  # fmt: skip


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_batch_size_for_each_feature(pooling, optimizer, device):
    case = vbe_case(pooling=pooling, optimizer=optimizer, weighted=True, sample_grad=True, pruned=0.2, padding=2)
    check(case, device)


@pytest.mark.parametrize(
    "batch_sizes", [(2, 1, 0, 1, 0, 0, 1, 1), (0, 0, 0, 0, 0, 3, 0, 0), (700, 1, 0, 2, 5, 0, 0, 0)]
)
def test_placement_of_bags(batch_sizes, device):
    """The kernel against PyTorch, through buckets that are not in the order of the features."""
    spec = vbe_case().build(device).spec
    placed = place_bags(torch.zeros(1, dtype=torch.int64, device=device), batch_sizes, spec)
    segments = Segments(*(torch.from_numpy(part) for part in segments_of(batch_sizes, spec)))
    expected = reference_placement(segments, sum(batch_sizes), len(spec.feature_tables))
    for name, tensor, other in zip(VbeLayout._fields, placed, expected, strict=True):
        assert torch.equal(tensor.cpu(), other), name


@pytest.mark.parametrize("batch_sizes", [(0, 0, 0, 0), (0, 2, 0, 0), (0, 0, 0, 3)], ids=str)
def test_features_without_samples(batch_sizes, device):
    lengths = tuple(tuple([2] * sum(batch_sizes[2 * f : 2 * f + 2])) for f in range(2))
    check(Case(dims=(8, 4), lengths=lengths, batch_sizes=batch_sizes), device)
