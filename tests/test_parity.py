"""The operator against two implementations that are not ours: `torch.nn.EmbeddingBag` and FBGEMM's TBE.

On CPU tensors this judges the reference, on a GPU the kernels against FBGEMM's CUDA kernels. The FBGEMM
tests record their errors (`forward_max_error` and so on) as a share of the largest magnitude, or in ulp
where the name says so: pytest tests/test_parity.py -o junit_family=xunit1 --junitxml errors.xml
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fbtriton.config import INTERPRET
from fbtriton.layout import Table
from fbtriton.module import TableBatchedEmbeddingBags
from fbtriton.optim import (
    SGD,
    Adagrad,
    Adam,
    Lamb,
    LarsSGD,
    Optimizer,
    PartialRowwiseAdam,
    PartialRowwiseLamb,
    RowwiseAdagrad,
)
from fbtriton.testing import SPACING, Batch, assert_close, make_batch, run_step

pytestmark = pytest.mark.parity

# What is promised against FBGEMM, as a share of the largest magnitude. Kernels on both sides sum in fp32,
# each in its own order: errors of a few spacings (1.2e-7), carried through ten steps. A wrong formula is
# off by far more.
PROMISED = 1e-5
PROMISED_ULP = 2  # of fp16 weights: each side rounds once, to a neighbour of the exact value


@dataclass(frozen=True)
class Case:
    """What is fixed at construction.

    The grids leave out what the other side lacks or is known to do otherwise: ids of -1, padding and bad
    input; the weighted mean (nn.EmbeddingBag has none, gradients of FBGEMM's lack the division by the bag's
    length); batch sizes for each feature; stochastic rounding; against FBGEMM also bf16 weights and dims
    that are not multiples of 4. Nor are there fp16 and bf16 outputs, which only round once more, or tables
    without rows.
    """

    optimizer: Optimizer
    pooling: str
    weighted: bool
    shared: bool
    weights_dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        optimizer = "-".join(map(str, [self.optimizer.name, *self.optimizer.hyperparameters]))
        kind = "weighted" if self.weighted else self.pooling
        sharing = "shared" if self.shared else "apart"
        return f"{optimizer}-{kind}-{sharing}-{self.weights_dtype}-{self.index_dtype}".replace("torch.", "")


@dataclass(frozen=True)
class Shape:
    """The tables and the batches, and where they lie."""

    device: str
    tables: tuple[tuple[int, int], ...]  # (rows, dim)
    shared_map: tuple[int, ...]  # feature_table_map of the cases that share tables
    batch_size: int
    max_length: int  # bags hold 0 to this many ids
    longest_run: int = 1  # each feature looks up row 0 at least this often


ODD_DIMS = Shape("cpu", ((400, 3), (300, 1), (200, 8)), (0, 1, 2, 0, 1), 16, 10)
# FBGEMM on the CPU merges the features of a table only if they are neighbours; otherwise it updates a row
# once for each of them, or raises. On CUDA they lie apart, and FBGEMM cuts runs of more than 1024 entries
# into pieces that are summed with atomics.
ON_CPU = Shape("cpu", ((200, 4), (50, 16), (31, 64)), (0, 0, 1, 2, 2), 16, 10)
CUDA_TABLES = ((50_000, 4), (100_000, 64), (10_000, 128), (1_000, 256))
ON_CUDA = Shape("cuda", CUDA_TABLES, (0, 1, 2, 3, 1, 0), 512, 40, longest_run=1025)

POOLINGS = [("sum", False), ("mean", False), ("sum", True)]  # (pooling, weighted)
LR = 2.0**-5  # the same number in fp32 and fp64
SMALL_LR = 2.0**-8  # times the fp32 error of a long sum it is below the smallest spacing of fp16


def make_module(case: Case, shape: Shape, seed: int) -> TableBatchedEmbeddingBags:
    torch.manual_seed(seed)
    module = TableBatchedEmbeddingBags(
        [Table(rows, dim) for rows, dim in shape.tables],
        optimizer=case.optimizer,
        feature_table_map=shape.shared_map if case.shared else None,
        pooling=case.pooling,
        weights_dtype=case.weights_dtype,
        stochastic_rounding=False,
        device=shape.device,
    )
    return module.init_uniform_(-1, 1)


def make_step(case: Case, shape: Shape, module: TableBatchedEmbeddingBags, seed: int) -> tuple[Batch, Tensor]:
    """A batch and the gradient of its output. Each feature's first and last bag are empty, others may be."""
    generator = torch.Generator().manual_seed(seed)
    rows = [shape.tables[table][0] for table in module.spec.feature_tables]
    lengths = torch.randint(0, shape.max_length + 1, (len(rows), shape.batch_size), generator=generator)
    lengths[:, [0, -1]] = 0
    options = {"index_dtype": case.index_dtype, "offset_dtype": case.index_dtype, "device": shape.device}
    batch = make_batch(rows, lengths, seed=seed, weighted=case.weighted, hot=0.2, **options)
    runs = [int((ids == 0).sum()) for ids in batch.indices.split(lengths.sum(dim=1).tolist())]
    assert min(runs) >= shape.longest_run, f"row 0 is looked up {runs} times, not {shape.longest_run}"
    grad_output = torch.rand(shape.batch_size, module.spec.layout.columns[-1], generator=generator) * 2 - 1
    return batch, grad_output.to(shape.device)


@pytest.fixture(autouse=True)
def not_interpreted():
    if INTERPRET and not torch.cuda.is_available():
        pytest.skip("the reference is tested in the process without TRITON_INTERPRET")


# torch.nn.EmbeddingBag


def look_up(bags: list[nn.EmbeddingBag], batch: Batch, sample_weights: Tensor | None) -> Tensor:
    """Each feature on its own, side by side."""
    outputs = []
    batch_size = (batch.offsets.numel() - 1) // len(bags)
    for feature, bag in enumerate(bags):
        offsets = batch.offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        weights = None if sample_weights is None else sample_weights[entries]
        outputs.append(bag(batch.indices[entries], offsets - offsets[0], weights))
    return torch.cat(outputs, dim=1)


WEIGHTS_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EMBEDDING_BAG_CASES = [
    Case(SGD(LR), *pooling, shared, dtype)
    for pooling, shared, dtype in itertools.product(POOLINGS, [False, True], WEIGHTS_DTYPES)
]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", EMBEDDING_BAG_CASES, ids=str)
def test_embedding_bag(case, seed):
    """One step. Both sides compute in fp64, and ours rounds each result once, which is off by half a spacing.
    The other half is for numbers so near the middle of two neighbours that the last bits of fp64 decide."""
    module = make_module(case, ODD_DIMS, seed)
    batch, grad_output = make_step(case, ODD_DIMS, module, seed)
    before = [view.clone() for view in module.split_embedding_weights()]
    options = {"freeze": False, "mode": case.pooling, "include_last_offset": True}
    tables = [nn.EmbeddingBag.from_pretrained(view.double(), **options) for view in before]
    sgd = torch.optim.SGD([table.weight for table in tables], lr=LR)
    sample_weights = batch.sample_weights.double().requires_grad_() if case.weighted else None
    output = look_up([tables[table] for table in module.spec.feature_tables], batch, sample_weights)
    output.backward(grad_output.double())
    sgd.step()
    step = run_step(module, batch, grad_output, sample_grad=case.weighted)

    fp32, rounded = SPACING[torch.float32], SPACING[case.weights_dtype]
    assert_close(step.output, output.detach(), tolerance=fp32, name="output")
    for old, new, table in zip(before, module.split_embedding_weights(), tables, strict=True):
        assert_close(new, table.weight.detach(), tolerance=rounded, name=f"weights, {list(new.shape)}")
        untouched = (table.weight.grad == 0).all(dim=1)
        assert untouched.any() and torch.equal(new[untouched], old[untouched])
    if case.weighted:
        assert_close(step.sample_weights_grad, sample_weights.grad, tolerance=fp32, name="sample weights")


# FBGEMM


class Trained(NamedTuple):
    """What training gave, in parts, each of which is judged by its own largest magnitude."""

    forward: list[Tensor]  # of each step
    weights: list[Tensor]  # of each table row 0, which moves far more than others, and the others
    states: list[Tensor]  # likewise; none for SGD
    sample_weights_grad: list[Tensor]  # of each step; none without per-sample weights


@pytest.fixture(params=[ON_CPU, pytest.param(ON_CUDA, marks=pytest.mark.gpu)], ids=lambda shape: shape.device)
def shape(request):
    return request.param


@pytest.fixture
def fbgemm(shape):
    """The Python module of FBGEMM that has its TBE and, in every release, the enums."""
    package = pytest.importorskip("fbgemm_gpu", reason="needs fbgemm_gpu, which is not installed")
    if shape.device == "cuda" and getattr(package, "__variant__", None) == "cpu":
        pytest.skip("needs the CUDA kernels of fbgemm_gpu; installed is a build for the CPU")
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


FBGEMM_NAMES = {
    SGD: "EXACT_SGD", LarsSGD: "LARS_SGD", Adagrad: "EXACT_ADAGRAD", RowwiseAdagrad: "EXACT_ROWWISE_ADAGRAD",
    Adam: "ADAM", PartialRowwiseAdam: "PARTIAL_ROWWISE_ADAM",
    Lamb: "LAMB", PartialRowwiseLamb: "PARTIAL_ROWWISE_LAMB",
}  # fmt: skip
ON_FBGEMMS_CPU = (SGD, Adagrad, RowwiseAdagrad)


def fbgemm_arguments(fbgemm: Any, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's numbers under FBGEMM's names, which are ours but for a few."""
    fields = dataclasses.asdict(optimizer)
    for name in ("lr", "initial_accumulator", "exp_avg_dtype", "exp_avg_sq_dtype"):
        fields.pop(name, None)
    modes = {"none": "NONE", "l2": "L2", "decoupled": "DECOUPLE"}
    fields["weight_decay_mode"] = fbgemm.WeightDecayMode[modes[fields.pop("weight_decay_mode", "none")]]
    max_gradient = fields.pop("max_gradient")
    return fields | {"gradient_clipping": max_gradient > 0, "max_gradient": max_gradient}


def skip_what_fbgemm_lacks(optimizer: Optimizer, shape: Shape) -> None:
    if shape.device != "cpu":
        return
    if type(optimizer) not in ON_FBGEMMS_CPU:
        pytest.skip(f"fbgemm_gpu has no {optimizer.name} on the CPU")
    if optimizer.variant not in ("sgd", "adagrad", "rowwise_adagrad"):
        pytest.skip("fbgemm_gpu on the CPU ignores weight decay and max_norm")


def make_twin(fbgemm: Any, module: TableBatchedEmbeddingBags, index_dtype: torch.dtype) -> Any:
    """FBGEMM's TBE for the spec of our module, with a copy of its weights."""
    spec = module.spec
    location, compute = ("DEVICE", "CUDA") if module.weights.is_cuda else ("HOST", "CPU")
    place = fbgemm.EmbeddingLocation[location], fbgemm.ComputeDevice[compute]
    twin = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for rows, dim in spec.tables],
        feature_table_map=list(spec.feature_tables),
        weights_precision=fbgemm.SparseType.from_dtype(spec.torch_weights_dtype),
        output_dtype=fbgemm.SparseType.from_dtype(spec.torch_output_dtype),
        optimizer=fbgemm.OptimType[FBGEMM_NAMES[type(module.optimizer)]],
        stochastic_rounding=spec.stochastic_rounding,
        learning_rate=module.optimizer.lr,
        **fbgemm_arguments(fbgemm, module.optimizer),
        pooling_mode=fbgemm.PoolingMode[spec.pooling.upper()],
        device=module.weights.device,
        embedding_table_index_type=index_dtype,
        embedding_table_offset_type=index_dtype,
    )
    for theirs, ours in zip(twin.split_embedding_weights(), module.split_embedding_weights(), strict=True):
        theirs.detach().copy_(ours)
    return twin


def train(module: Any, steps: list[tuple[Batch, Tensor]]) -> Trained:
    """Our module or its twin: they are called alike, and name their views alike."""
    outputs, sample_weights_grads = [], []
    for batch, grad_output in steps:
        weights = None if batch.sample_weights is None else batch.sample_weights.clone().requires_grad_()
        output = module(batch.indices.clone(), batch.offsets.clone(), weights)
        output.backward(grad_output)
        outputs.append(output.detach())
        if weights is not None:
            sample_weights_grads.append(weights.grad)
    states = [state.flatten() for states in module.split_optimizer_states() for state in states]
    return Trained(
        forward=outputs,
        weights=[rows for view in module.split_embedding_weights() for rows in (view[:1], view[1:])],
        states=[rows for state in states for rows in (state[:1], state[1:])],
        sample_weights_grad=sample_weights_grads,
    )


def train_both(case: Case, shape: Shape, fbgemm: Any, num_steps: int) -> tuple[Trained, Trained]:
    module = make_module(case, shape, seed=1)
    twin = make_twin(fbgemm, module, case.index_dtype)
    steps = [make_step(case, shape, module, seed) for seed in range(num_steps)]
    ours = train(module, steps)
    torch.use_deterministic_algorithms(False)  # FBGEMM as it runs by default; conftest restores what was set
    return ours, train(twin, steps)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error = (actual.double() - expected.double()).abs().max()
    return float(error / expected.double().abs().max()) if error else 0.0


def error_in_ulp(actual: Tensor, expected: Tensor) -> float:
    """The largest error of fp16 numbers, each in spacings of fp16 at its own magnitude."""
    magnitudes = expected.double().abs().clamp_min(torch.finfo(torch.float16).smallest_normal)
    _, exponents = torch.frexp(magnitudes)  # magnitude in [2^(exponent - 1), 2^exponent)
    spacings = torch.ldexp(torch.full_like(magnitudes, SPACING[torch.float16]), exponents - 1)
    return float(((actual.double() - expected.double()).abs() / spacings).max())


def check(record_property: Any, name: str, ours: Trained, theirs: Trained) -> None:
    """Record the worst relative error of all parts, then compare each."""
    pairs = list(zip(getattr(ours, name), getattr(theirs, name), strict=True))
    if pairs:
        record_property(f"{name}_max_error", max(relative_error(*pair) for pair in pairs))
    for number, (actual, expected) in enumerate(pairs):
        assert_close(actual, expected, tolerance=PROMISED, name=f"{name}, part {number}")


# With eps = 0.5, about as large as the root next to it, an eps in the wrong place shows.
TEN_STEP_OPTIMIZERS = [SGD(LR), RowwiseAdagrad(LR), RowwiseAdagrad(LR, eps=0.5)]
TEN_STEP_GRID = itertools.product(TEN_STEP_OPTIMIZERS, POOLINGS, [False, True], [torch.int32, torch.int64])
TEN_STEP_CASES = [
    Case(optimizer, *pooling, shared, index_dtype=index_dtype)
    for optimizer, pooling, shared, index_dtype in TEN_STEP_GRID
]


@pytest.mark.parametrize("case", TEN_STEP_CASES, ids=str)
def test_fbgemm_ten_steps(case, shape, fbgemm, record_property):
    ours, theirs = train_both(case, shape, fbgemm, num_steps=10)
    for name in Trained._fields:
        check(record_property, name, ours, theirs)


# Weights are in [-1, 1): rows of 4 elements are on both sides of max_norm.
DECAY = {"eps": 0.5, "weight_decay": 0.25}
MORE_OPTIMIZERS = [
    SGD(LR, max_gradient=0.25),
    Adagrad(LR),
    Adagrad(LR, eps=0.5),
    RowwiseAdagrad(LR, max_gradient=0.25),
    RowwiseAdagrad(LR, max_norm=1.25),
    RowwiseAdagrad(LR, weight_decay_mode="l2", **DECAY),
    RowwiseAdagrad(LR, weight_decay_mode="decoupled", **DECAY),
    RowwiseAdagrad(LR, weight_decay_mode="l2", max_norm=1.25, **DECAY),
    RowwiseAdagrad(LR, weight_decay_mode="decoupled", max_norm=1.25, **DECAY),
    Adam(LR, **DECAY),
    PartialRowwiseAdam(LR, **DECAY),
    Lamb(LR, **DECAY),
    PartialRowwiseLamb(LR, **DECAY),
    LarsSGD(LR, eta=0.5, weight_decay=0.25),
]


@pytest.mark.parametrize("pooling, weighted", [("mean", False), ("sum", True)])
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS, ids=str)
def test_fbgemm_ten_steps_of_other_optimizers(optimizer, pooling, weighted, shape, fbgemm, record_property):
    skip_what_fbgemm_lacks(optimizer, shape)
    case = Case(optimizer, pooling, weighted, shared=True)
    ours, theirs = train_both(case, shape, fbgemm, num_steps=10)
    for name in Trained._fields:
        check(record_property, name, ours, theirs)


FP16_OPTIMIZERS = [SGD(SMALL_LR), RowwiseAdagrad(SMALL_LR)]
FP16_CASES = [
    Case(optimizer, *pooling, shared, torch.float16)
    for optimizer, pooling, shared in itertools.product(FP16_OPTIMIZERS, POOLINGS, [False, True])
]


@pytest.mark.parametrize("case", FP16_CASES, ids=str)
def test_fbgemm_one_step_of_fp16(case, shape, fbgemm, record_property):
    if shape.device == "cpu" and case.optimizer.name == "sgd":
        pytest.skip("fbgemm_gpu on the CPU sums the gradients of SGD on fp16 weights in fp16")
    ours, theirs = train_both(case, shape, fbgemm, num_steps=1)
    for name in ("forward", "states", "sample_weights_grad"):
        check(record_property, name, ours, theirs)
    error = max(map(error_in_ulp, ours.weights, theirs.weights))
    record_property("weights_max_error_ulp", error)
    assert error <= PROMISED_ULP, f"weights: maximum error {error} ulp, allowed {PROMISED_ULP}"


@pytest.mark.parametrize("optimizer", [SGD(LR), RowwiseAdagrad(LR)], ids=lambda optimizer: optimizer.name)
def test_fbgemm_batch_sizes(optimizer, shape, fbgemm, record_property):
    """A batch size for each feature and rank, which differ; the output has FBGEMM's order."""
    module = make_module(Case(optimizer, "sum", weighted=False, shared=True), shape, seed=1)
    twin = make_twin(fbgemm, module, torch.int64)
    sizes = [[shape.batch_size // 4 + 3 * f, 2 + f] for f in range(len(shape.shared_map))]
    rows = [shape.tables[table][0] for table in shape.shared_map]
    outputs = []
    torch.use_deterministic_algorithms(False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = [torch.randint(0, shape.max_length, (sum(ranks),), generator=generator) for ranks in sizes]
        batch = make_batch(rows, lengths, seed=seed, hot=0.2, device=shape.device)
        pair = [
            module(batch.indices.clone(), batch.offsets.clone(), batch_sizes=sizes),
            twin(batch.indices.clone(), batch.offsets.clone(), batch_size_per_feature_per_rank=sizes),
        ]
        grad_output = (torch.rand(pair[0].shape, generator=generator) * 2 - 1).to(shape.device)
        for output in pair:
            output.backward(grad_output)
        outputs.append([output.detach() for output in pair])
    views = [other.split_embedding_weights() for other in (module, twin)]
    for name, pairs in (("forward", outputs), ("weights", list(zip(*views, strict=True)))):
        record_property(f"{name}_max_error", max(relative_error(*pair) for pair in pairs))
        for number, (ours, theirs) in enumerate(pairs):
            assert_close(ours, theirs, tolerance=PROMISED, name=f"{name}, part {number}")
