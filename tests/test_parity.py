"""The operator, and FBGEMM's class on top of it, against FBGEMM's TBE.

On CPU tensors this judges the reference, on a GPU the kernels against FBGEMM's CUDA kernels. The tests record
their errors (`forward_max_error` and so on) as a share of the largest magnitude, or in ulp where the name
says so: pytest tests/test_parity.py -o junit_family=xunit1 --junitxml errors.xml
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import pytest
import torch
from parity_cases import (
    LR,
    ON_CPU,
    ON_CUDA,
    ONE_DIM_ON_CPU,
    ONE_DIM_ON_CUDA,
    POOLINGS,
    SMALL_LR,
    Case,
    Shape,
    make_module,
    make_step,
)
from torch import Tensor

from fbtriton import fbgemm_api
from fbtriton.config import INTERPRET
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
from fbtriton.testing import SPACING, Batch, assert_close, make_batch

pytestmark = pytest.mark.parity

# What is promised against FBGEMM, as a share of the largest magnitude. Kernels on both sides sum in fp32,
# each in its own order: errors of a few spacings (1.2e-7), carried through ten steps. A wrong formula is
# off by far more.
PROMISED = 1e-5
PROMISED_ULP = 2  # of fp16 weights: each side rounds once, to a neighbour of the exact value


@pytest.fixture(autouse=True)
def not_interpreted():
    if INTERPRET and not torch.cuda.is_available():
        pytest.skip("the reference is tested in the process without TRITON_INTERPRET")


class Trained(NamedTuple):
    """What training gave, in parts, each of which is judged by its own largest magnitude."""

    forward: list[Tensor]  # of each step
    weights: list[Tensor]  # of each table row 0, which moves far more than others, and the others
    states: list[Tensor]  # likewise; none for SGD
    sample_weights_grad: list[Tensor]  # of each step; none without per-sample weights


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def shape(device):
    return ON_CPU if device == "cpu" else ON_CUDA


@pytest.fixture
def fbgemm(device):
    """The Python module of FBGEMM that has its TBE and, in every release, the enums."""
    package = pytest.importorskip("fbgemm_gpu", reason="needs fbgemm_gpu, which is not installed")
    if device == "cuda" and getattr(package, "__variant__", None) == "cpu":
        pytest.skip("needs the CUDA kernels of fbgemm_gpu; installed is a build for the CPU")
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


FBGEMM_NAMES = {
    SGD: "EXACT_SGD", LarsSGD: "LARS_SGD", Adagrad: "EXACT_ADAGRAD", RowwiseAdagrad: "EXACT_ROWWISE_ADAGRAD",
    Adam: "ADAM", PartialRowwiseAdam: "PARTIAL_ROWWISE_ADAM",
    Lamb: "LAMB", PartialRowwiseLamb: "PARTIAL_ROWWISE_LAMB",
}  # fmt: skip
ON_FBGEMMS_CPU = (SGD, Adagrad, RowwiseAdagrad)
# A build of FBGEMM for a GPU may leave out machine code. Of these optimizers it must not.
IN_EVERY_BUILD = (SGD, RowwiseAdagrad, Adam)
NO_MACHINE_CODE = re.compile("kernel image|invalid device function|named symbol not found")


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


def make_twin(
    fbgemm: Any, module: TableBatchedEmbeddingBags, index_dtype: torch.dtype = torch.int64, library: Any = None
) -> Any:
    """FBGEMM's TBE for the spec of our module, with a copy of its weights; or the class of a library in its place, from
    the same arguments, FBGEMM's enumerations included."""
    spec = module.spec
    location, compute = ("DEVICE", "CUDA") if module.weights.is_cuda else ("HOST", "CPU")
    place = fbgemm.EmbeddingLocation[location], fbgemm.ComputeDevice[compute]
    twin = (library or fbgemm).SplitTableBatchedEmbeddingBagsCodegen(
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
    return ours, train_fbgemm(twin, steps, case.optimizer)


def train_fbgemm(twin: Any, steps: list[tuple[Batch, Tensor]], optimizer: Optimizer) -> Trained:
    torch.use_deterministic_algorithms(False)  # FBGEMM as it runs by default; conftest restores what was set
    try:
        return train(twin, steps)
    except RuntimeError as error:
        if type(optimizer) in IN_EVERY_BUILD or not NO_MACHINE_CODE.search(str(error)):
            raise
        pytest.skip(f"this build of fbgemm_gpu has no machine code of {optimizer.name} for this GPU")


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


# In place of FBGEMM's class: arguments, call and views are FBGEMM's on both sides.
CLASS_OPTIMIZERS = [
    SGD(LR),
    Adagrad(LR, eps=0.5),
    RowwiseAdagrad(LR, eps=0.5),
    RowwiseAdagrad(LR, weight_decay_mode="l2", max_norm=1.25, **DECAY),
    RowwiseAdagrad(LR, weight_decay_mode="decoupled", max_gradient=0.25, **DECAY),
    Adam(LR, **DECAY),
]


def class_and_twin(fbgemm: Any, case: Case, shape: Shape) -> tuple[TableBatchedEmbeddingBags, Any, Any]:
    module = make_module(case, shape, seed=1)
    return module, *(make_twin(fbgemm, module, case.index_dtype, library) for library in (fbgemm_api, fbgemm))


@pytest.mark.parametrize("pooling, weighted", POOLINGS)
@pytest.mark.parametrize("optimizer", CLASS_OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_fbgemm_class_ten_steps(optimizer, pooling, weighted, shape, fbgemm, record_property):
    skip_what_fbgemm_lacks(optimizer, shape)
    case = Case(optimizer, pooling, weighted, shared=True)
    module, ours, theirs = class_and_twin(fbgemm, case, shape)
    steps = [make_step(case, shape, module, seed) for seed in range(10)]
    results = train(ours, steps), train_fbgemm(theirs, steps, optimizer)
    for name in Trained._fields:
        check(record_property, name, *results)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("optimizer", [RowwiseAdagrad(LR, eps=0.5)], ids=lambda optimizer: optimizer.name)
def test_fbgemm_class_without_pooling(optimizer, index_dtype, device, fbgemm, record_property):
    shape = ONE_DIM_ON_CPU if device == "cpu" else ONE_DIM_ON_CUDA
    case = Case(optimizer, "none", False, shared=True, index_dtype=index_dtype)
    module, ours, theirs = class_and_twin(fbgemm, case, shape)
    steps = [make_step(case, shape, module, seed) for seed in range(10)]
    results = train(ours, steps), train_fbgemm(theirs, steps, optimizer)
    for name in Trained._fields:
        check(record_property, name, *results)


@pytest.mark.parametrize("kind", ["module", "class"])
@pytest.mark.parametrize("optimizer", [SGD(LR), RowwiseAdagrad(LR)], ids=lambda optimizer: optimizer.name)
def test_fbgemm_batch_sizes(optimizer, kind, shape, fbgemm, record_property):
    """A batch size for each feature and rank, which differ; the output has FBGEMM's order."""
    module, ours, twin = class_and_twin(fbgemm, Case(optimizer, "sum", weighted=False, shared=True), shape)
    sizes = [[shape.batch_size // 4 + 3 * f, 2 + f] for f in range(len(shape.shared_map))]
    rows = [shape.tables[table][0] for table in shape.shared_map]
    outputs = []
    torch.use_deterministic_algorithms(False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        lengths = [torch.randint(0, shape.max_length, (sum(ranks),), generator=generator) for ranks in sizes]
        batch = make_batch(rows, lengths, seed=seed, hot=0.2, device=shape.device)
        inputs = [(batch.indices.clone(), batch.offsets.clone()) for _ in range(2)]
        pair = [
            module(*inputs[0], batch_sizes=sizes)
            if kind == "module"
            else ours(*inputs[0], batch_size_per_feature_per_rank=sizes),
            twin(*inputs[1], batch_size_per_feature_per_rank=sizes),
        ]
        grad_output = (torch.rand(pair[0].shape, generator=generator) * 2 - 1).to(shape.device)
        for output in pair:
            output.backward(grad_output)
        outputs.append([output.detach() for output in pair])
    views = [other.split_embedding_weights() for other in (module if kind == "module" else ours, twin)]
    for name, pairs in (("forward", outputs), ("weights", list(zip(*views, strict=True)))):
        record_property(f"{name}_max_error", max(relative_error(*pair) for pair in pairs))
        for number, (ours, theirs) in enumerate(pairs):
            assert_close(ours, theirs, tolerance=PROMISED, name=f"{name}, part {number}")
