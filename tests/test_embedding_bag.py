"""The operator against `torch.nn.EmbeddingBag`. On CPU tensors this judges the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from parity_cases import LR, ODD_DIMS, POOLINGS, Case, make_module, make_step
from torch import Tensor, nn

from fbtriton.config import INTERPRET
from fbtriton.optim import SGD
from fbtriton.testing import SPACING, Batch, assert_close, run_step

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def not_interpreted():
    if INTERPRET and not torch.cuda.is_available():
        pytest.skip("the reference is tested in the process without TRITON_INTERPRET")


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
