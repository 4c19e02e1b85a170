"""Stochastic rounding: the noise and how it rounds, for kernels and for the reference.

Noise is a function of (seed, step, row, column) alone, so the same inputs give the same weights whatever the
launch, and rows of different tables never share a stream. It comes from Philox4x32 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC11; 7 rounds pass their tests): one call gives 8 columns 16 bits each.

    key      = seed
    counter  = (row low 32 bits, column // 8 + (row high 32 bits << 16), step low 32 bits, step high 32 bits)
    column c takes word (c % 8) // 2, its low half when c is even, its high half when c is odd

where row counts through all tables. Rounding x to a format with m mantissa bits truncates |x| after adding noise
below the last kept bit, so x goes up with a probability equal to the dropped fraction: the mean is x. A finite x
stays finite. fp16 drops 13 bits and bf16 16. Below 2^-14 fp16 has a fixed step of 2^-24; there |x| is first rounded
to a multiple of 2^-37, the nearest, so that 13 bits are dropped as well.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fbtriton._triton import tl, triton

PHILOX_ROUNDS = 7
ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def rounding_noise(seed, step, row, BLOCK_D: tl.constexpr):
    """16 random bits for each element of the rows. seed, step: int64 scalars; row [R] int64. -> [R, BLOCK_D] uint32"""
    if BLOCK_D >= 8:
        group = tl.arange(0, BLOCK_D // 8)
    else:
        group = tl.zeros([BLOCK_D], tl.int32)
    row_low = (row & 0xFFFFFFFF).to(tl.uint32)[:, None]
    row_high = (row >> 32).to(tl.uint32)[:, None]
    first = row_low + tl.zeros_like(group).to(tl.uint32)[None, :]  # [R, groups]
    second = group.to(tl.uint32)[None, :] + (row_high << 16)
    step_low = tl.zeros_like(first) + (step & 0xFFFFFFFF).to(tl.uint32)
    step_high = tl.zeros_like(first) + (step >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, first, second, step_low, step_high, ROUNDS)
    if BLOCK_D >= 8:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, groups, 2, 2], word = 2 * third + fourth
        words = tl.reshape(words, (row.shape[0], BLOCK_D // 2))
        noise = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (row.shape[0], BLOCK_D))
    else:
        column = tl.arange(0, BLOCK_D)[None, :]
        word = tl.where(column < 2, w0, w1)
        noise = tl.where(column % 2 == 0, word & 0xFFFF, word >> 16)
    return noise


@triton.jit
def round_to_bfloat16(value, noise):
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + noise) & 0xFFFF0000, 0x7F7F0000)
    rounded = tl.where(magnitude > 0x7F800000, magnitude | 0x00400000, rounded)  # a NaN stays one when truncated
    rounded = tl.where(magnitude == 0x7F800000, magnitude, rounded)
    return ((rounded | (bits & 0x80000000)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_float16(value, noise):
    """Below 2^-14, where fp16 has a fixed step, 2^-14 is added and taken off again: then 13 bits are dropped there
    too."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    lift = tl.where(magnitude < 0x38800000, 0.00006103515625, 0.0)
    lifted = (magnitude.to(tl.float32, bitcast=True) + lift).to(tl.uint32, bitcast=True)
    rounded = tl.minimum((lifted + (noise & 0x1FFF)) & 0xFFFFE000, 0x477FE000)
    rounded = tl.where(magnitude >= 0x7F800000, magnitude, rounded)
    rounded = (rounded.to(tl.float32, bitcast=True) - lift).to(tl.uint32, bitcast=True)
    return (rounded | (bits & 0x80000000)).to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def round_stochastically(value, noise, DTYPE: tl.constexpr):
    """value fp32 and noise uint32, same shape -> DTYPE (fp16 or bf16)."""
    if DTYPE == tl.bfloat16:
        result = round_to_bfloat16(value, noise)
    else:
        result = round_to_float16(value, noise)
    return result


def rounding_noise_reference(seed: int, step: int, rows: Tensor, dim: int) -> Tensor:
    """The noise of the module's docstring. rows [n] int64 -> [n, dim] int64 in [0, 65536)."""
    row = rows.cpu().numpy().astype(np.uint64)[:, None]
    group = np.arange((dim + 7) // 8, dtype=np.uint64)[None, :]
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    words = [
        (row & low) + 0 * group,
        (group + ((row >> shift) << np.uint64(16))) & low,
        np.full_like(row + group, step & 0xFFFFFFFF),
        np.full_like(row + group, step >> 32),
    ]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(PHILOX_ROUNDS):
        product0 = words[0] * np.uint64(0xD2511F53)
        product2 = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (product2 >> shift) ^ words[1] ^ key[0],
            product2 & low,
            (product0 >> shift) ^ words[3] ^ key[1],
            product0 & low,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    halves = [half for word in words for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    noise = np.stack(halves, axis=-1).reshape(len(row), -1)[:, :dim].astype(np.int64)
    return torch.from_numpy(noise).to(rows.device)


def round_stochastically_reference(value: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a multiple of the target's spacing at |value|, up where noise is below the dropped fraction.

    Args:
        value: fp32, any shape.
        noise: int64 in [0, 65536), same shape.
        dtype: torch.float16 or torch.bfloat16.
    """
    kept_bits, least_exponent = (10, -14) if dtype == torch.float16 else (7, -126)
    dropped_bits = 13 if dtype == torch.float16 else 16
    exact = value.double()
    magnitude = exact.abs()
    if dtype == torch.float16:
        subnormal = magnitude < 2.0**-14
        magnitude = torch.where(subnormal, (magnitude * 2.0**37).round() * 2.0**-37, magnitude)
    exponent = torch.frexp(magnitude)[1].long() - 1
    spacing = torch.ldexp(torch.ones_like(exact), exponent.clamp_min(least_exponent) - kept_bits)
    steps = magnitude / spacing
    whole = steps.floor()
    fraction = (steps - whole) * 2.0**dropped_bits  # a whole number
    up = (noise & (1 << dropped_bits) - 1) + fraction >= 2.0**dropped_bits
    rounded = ((whole + up) * spacing).clamp_max(torch.finfo(dtype).max)
    rounded = torch.where(torch.isfinite(value), torch.copysign(rounded, exact), exact)
    return rounded.to(dtype)
