"""TorchRec's pipelines, and DMPCollection (2D: replicas of a sharded model), with FUSED_TRITON."""

import dataclasses

import pytest
import torch

from fbtriton.testing import assert_close

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")
from torchrec.distributed.types import ShardingStrategy
from torchrec_models import Case
from torchrec_pipelines import train_in_two_dimensions, train_through
from torchrec_ranks import run_on_ranks

pytestmark = pytest.mark.torchrec

TOLERANCE = 32 * torch.finfo(torch.float32).eps  # see test_torchrec_training.py
CASE = Case(shardings=("table_wise", "row_wise", "column_wise"), steps=4)


@pytest.mark.parametrize("pipeline", ["TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite"])
def test_pipelines_train_as_without(pipeline):
    through = run_on_ranks(2, train_through, pipeline=pipeline, case=CASE)
    plain = run_on_ranks(2, train_through, pipeline=None, case=CASE)
    for (losses, weights), (expected_losses, expected_weights) in zip(through, plain, strict=True):
        assert losses == expected_losses and len(set(losses)) == CASE.steps
        for name, expected in expected_weights.items():
            assert torch.equal(weights[name], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "pipeline", ["TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "TrainPipelineSemiSync"]
)
def test_pipelines_on_a_gpu_train_like_fused(pipeline):
    """The last two need streams. Semi-sync computes with rows of the step before, by design, in either kernel."""
    case = dataclasses.replace(CASE, shardings=("table_wise",), steps=6)
    (ours,) = run_on_ranks(1, train_through, pipeline=pipeline, case=case, device="cuda")
    fused = dataclasses.replace(case, kernels=("fused",))
    (theirs,) = run_on_ranks(1, train_through, pipeline=pipeline, case=fused, device="cuda")
    assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE) and len(ours[0]) == case.steps
    for name, expected in theirs[1].items():
        assert_close(ours[1][name], expected, tolerance=TOLERANCE, name=name)


def test_replicas_are_averaged():
    """Two replicas of two ranks: rank 0 and 1 hold the same shards, 2 and 3 too, and so after a sync the same numbers,
    those of FUSED."""
    case = dataclasses.replace(CASE, steps=2)
    ranks = run_on_ranks(4, train_in_two_dimensions, case=case)
    fused = run_on_ranks(4, train_in_two_dimensions, case=dataclasses.replace(case, kernels=("fused",)))
    for first, second in [(0, 1), (2, 3)]:
        for mine, other in zip(ranks[first]["after"], ranks[second]["after"], strict=True):
            assert torch.equal(mine, other)
        before = zip(ranks[first]["before"], ranks[second]["before"], strict=True)
        assert not all(torch.equal(mine, other) for mine, other in before)
    for ours, theirs in zip(ranks, fused, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
        for number, (tensor, expected) in enumerate(zip(ours["after"], theirs["after"], strict=True)):
            assert_close(tensor, expected, tolerance=TOLERANCE, name=str(number))


def test_fully_sharded_replicas_are_refused():
    strategy = ShardingStrategy.FULLY_SHARDED
    with pytest.raises(RuntimeError, match="NotImplementedError: FUSED_TRITON with ShardingStrategy.FULLY_SHARDED"):
        run_on_ranks(4, train_in_two_dimensions, case=CASE, sharding_strategy=strategy)
