"""Stochastic rounding: the kernel draws and rounds exactly as the reference, and the reference is unbiased."""

import math

import pytest
import torch

from fbtriton import SGD, Table, TableBatchedEmbeddingBags
from fbtriton._triton import HAS_TRITON, tl, triton
from fbtriton.rounding import (
    round_stochastically,
    round_stochastically_reference,
    rounding_noise,
    rounding_noise_reference,
)

HALVES = [torch.float16, torch.bfloat16]
STEPS = 1000

if HAS_TRITON:

    @triton.jit
    def round_kernel(out_ptr, noise_ptr, value_ptr, row_ptr, state_ptr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
        row = tl.load(row_ptr + tl.program_id(0) + tl.zeros([1], tl.int32))
        noise = rounding_noise(tl.load(state_ptr), tl.load(state_ptr + 1), row, BLOCK_D)
        column = tl.arange(0, BLOCK_D)
        place = (tl.program_id(0) * DIM + column)[None, :]
        mask = (column < DIM)[None, :]
        value = tl.load(value_ptr + place, mask=mask, other=0.0)
        tl.store(out_ptr + place, round_stochastically(value, noise, out_ptr.dtype.element_ty), mask=mask)
        tl.store(noise_ptr + place, noise.to(tl.int64), mask=mask)


def hard_values(dim):
    """Every kind of fp32 number: normal, subnormal in the target, tiny, huge, representable, special."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-40, 20, (6, dim), generator=generator)
    values = torch.ldexp(torch.rand(6, dim, generator=generator) * 2 - 1, exponents)
    special = [0.0, -0.0, 1.0, 65504.0, 65519.0, -65535.0, 7e4, 3.4e38, 2.0**-24, 2.0**-25, 2.0**-14, 6.1e-5]
    special += [float("inf"), float("-inf"), float("nan"), 1e-38, 1e-40]
    values.view(-1)[: len(special)] = torch.tensor(special)[: values.numel()]
    return values


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", [1, 3, 4, 8, 20, 64])
def test_rounding(dtype, dim, device):
    values, rows = hard_values(dim), torch.tensor([0, 1, 7, 2**31, 2**33 + 5, 2**40])
    seed, step = 0x1234_5678_9ABC_DEF0, 2**35 + 3
    out = torch.empty(6, dim, dtype=dtype, device=device)
    noise = torch.empty(6, dim, dtype=torch.int64, device=device)
    round_kernel[(6,)](
        out_ptr=out,
        noise_ptr=noise,
        value_ptr=values.to(device),
        row_ptr=rows.to(device),
        state_ptr=torch.tensor([seed, step], device=device),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
    )
    expected_noise = rounding_noise_reference(seed, step, rows, dim)
    assert torch.equal(noise.cpu(), expected_noise)
    expected = round_stochastically_reference(values, expected_noise, dtype)
    assert torch.equal(out.cpu().nan_to_num(1.5), expected.nan_to_num(1.5))
    assert torch.equal(torch.isnan(out.cpu()), torch.isnan(expected))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounds_to_a_neighbour(dtype):
    values = hard_values(64)
    values = values[torch.isfinite(values) & (values.abs() < torch.finfo(dtype).max)]
    noise = torch.randint(0, 65536, values.shape, generator=torch.Generator().manual_seed(1))
    rounded = round_stochastically_reference(values, noise, dtype).double()
    least_exponent, kept = (-14, 10) if dtype == torch.float16 else (-126, 7)
    exponent = (torch.frexp(values.double().abs())[1] - 1).clamp_min(least_exponent)
    spacing = torch.ldexp(torch.ones_like(rounded), exponent - kept)
    assert ((rounded - values.double()).abs() < spacing).all()
    representable = values.to(dtype).float() == values
    assert torch.equal(rounded[representable], values[representable].double())


def test_finite_stays_finite():
    noise = torch.full((4,), 65535)
    values = torch.tensor([65519.0, -65535.0, 1e30, 3.4e38])
    assert torch.isfinite(round_stochastically_reference(values, noise, torch.float16)).all()
    assert torch.isfinite(round_stochastically_reference(values, noise, torch.bfloat16)).all()


def test_noise_differs_by_seed_step_row_and_column():
    base = rounding_noise_reference(1, 1, torch.arange(64), 64)
    assert base.unique().numel() > 3900  # of 4096 draws from 65536 values
    for seed, step, first in ((2, 1, 0), (1, 2, 0), (1, 1, 64)):
        other = rounding_noise_reference(seed, step, torch.arange(first, first + 64), 64)
        assert (other == base).float().mean() < 0.01


def drift(dtype, device, start):
    """The mean of 1,000 updates of a quarter of the spacing at `start`, for 32 x 64 elements, in spacings."""
    torch.manual_seed(5)
    spacing = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype] * start
    module = TableBatchedEmbeddingBags([Table(32, 64)], optimizer=SGD(1.0), weights_dtype=dtype, device=device)
    indices, offsets = torch.arange(32, device=device), torch.arange(33, device=device)
    module.weights.fill_(start)
    total = torch.zeros(module.weights.shape, dtype=torch.float64, device=device)
    for _ in range(STEPS):
        module.weights.fill_(start)
        module(indices, offsets).backward(torch.full((32, 64), -spacing / 4, device=device))
        total += (module.weights.double() - start) / spacing
    return total / STEPS


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_unbiased_over_many_steps(dtype, backend):
    """Each element goes up with probability 1/4: its mean over 1,000 steps is within 5 sigma of a quarter."""
    mean = drift(dtype, "cuda" if backend == "gpu" else "cpu", 1.0)
    sigma = math.sqrt(0.25 * 0.75 / STEPS)
    assert (mean - 0.25).abs().max() < 5 * sigma
    assert (mean.mean() - 0.25).abs() < 5 * sigma / math.sqrt(mean.numel())


def test_fp32_rows_are_never_rounded(any_device):
    results = []
    for stochastic in (True, False):
        torch.manual_seed(5)
        module = TableBatchedEmbeddingBags(
            [Table(8, 4)], optimizer=SGD(0.1), stochastic_rounding=stochastic, device=any_device
        ).init_uniform_(-1, 1)
        indices, offsets = torch.arange(8, device=any_device), torch.arange(9, device=any_device)
        module(indices, offsets).backward(torch.full((8, 4), 0.3, device=any_device))
        results.append(module.weights.clone())
    assert torch.equal(*results)
