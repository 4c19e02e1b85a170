"""indices, offsets -> [check of the offsets] -> histogram | gather -> output, with the stamp for the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fbtriton import reference
from fbtriton.batch import BatchShape
from fbtriton.bounds_check import check_offsets
from fbtriton.config import uses_kernels
from fbtriton.forward.gather import gather
from fbtriton.forward.histogram import histogram
from fbtriton.forward.routing import counted_tables, gathered_features, histogram_features
from fbtriton.layout import Bags
from fbtriton.optim import make_stamp, stamp_size
from fbtriton.spec import OperatorSpec


class Forward(NamedTuple):
    """What the forward gives."""

    output: Tensor  # pooled rows, of `BatchShape.output_shape`
    stamp: Tensor  # see `fbtriton.rows`
    offsets: Tensor  # the repaired offsets; empty if they were checked before
    counts: Tensor  # see `forward.histogram`, of all counted features; empty if the backward makes no use of any


def forward(
    *,
    weights: Tensor,
    hyperparameters: Tensor,
    seed_and_step: Tensor,
    iteration: Tensor | None,
    bags: Bags,
    report: Tensor | None,
    shape: BatchShape,
    spec: OperatorSpec,
) -> Forward:
    """With a report the bounds are checked here (fused); without one the bags have passed the check before.
    An iteration is counted up."""
    if not uses_kernels(weights.device):
        repaired = bags.offsets.new_empty(0)
        if report is not None:
            repaired = reference.bounds_check(bags=bags, report=report, shape=shape, spec=spec)
            bags = bags._replace(offsets=repaired)
        output = reference.forward(weights=weights, bags=bags, shape=shape, spec=spec)
        stamp = make_stamp(hyperparameters, seed_and_step, iteration)
        return Forward(output, stamp, repaired, weights.new_empty(0, dtype=torch.uint8))
    check = check_offsets(bags=bags, report=report, spec=spec) if report is not None else None
    repaired = bags.offsets.new_empty(0) if check is None else check.repaired
    output = weights.new_empty(shape.output_shape, dtype=spec.torch_output_dtype)
    counts = weights.new_empty(0, dtype=torch.uint8)
    if shape.num_bags == 0:
        return Forward(output, make_stamp(hyperparameters, seed_and_step, iteration), repaired, counts)
    stamp = seed_and_step.new_empty(stamp_size(hyperparameters, iteration))
    counted, histogram_config = histogram_features(
        spec,
        bags.indices.numel() / shape.num_bags,
        weighted=bags.sample_weights is not None,
        vbe=bags.vbe is not None,
    )
    if counted:
        all_counts = histogram(
            out=output,
            stamp=stamp,
            weights=weights,
            hyperparameters=hyperparameters,
            seed_and_step=seed_and_step,
            iteration=iteration,
            bags=bags,
            check=check,
            report=report,
            features=counted,
            config=histogram_config,
            shape=shape,
            spec=spec,
        )
        counts = all_counts if counted_tables(spec, counted) else counts
    gather(
        out=output,
        stamp=None if counted else stamp,
        weights=weights,
        hyperparameters=hyperparameters,
        seed_and_step=seed_and_step,
        iteration=iteration,
        bags=bags,
        check=check,
        report=report,
        parts=gathered_features(spec, counted),
        shape=shape,
        spec=spec,
    )
    return Forward(output, stamp, repaired, counts)
