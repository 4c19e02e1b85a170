"""Checkpoints of FUSED and FUSED_TRITON are the same: each resumes the other's, and training goes on as before."""

import dataclasses

import pytest
import torch

from fbtriton.testing import assert_close

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")
from torchrec_checkpoints import resume_in_turn, save_and_load_in_place
from torchrec_models import Case, train
from torchrec_ranks import run_on_ranks

pytestmark = pytest.mark.torchrec

TOLERANCE = 64 * torch.finfo(torch.float32).eps  # see test_torchrec_training.py; here twice the steps
SHARDINGS = ("table_wise", "row_wise", "column_wise")


@pytest.mark.parametrize("how", ["state_dict", "distributed_checkpoint"])
@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "EXACT_SGD"])
@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "sequence"])
def test_fused_to_fused_triton_and_back(how, optimizer, sequence, tmp_path):
    """Three models in turn, each loaded from the one before, train as one model of FUSED does."""
    case = Case(shardings=SHARDINGS, optimizer=optimizer, sequence=sequence)
    changing = run_on_ranks(
        2, resume_in_turn, case=case, kernels=("fused", "fused_triton", "fused"), how=how, folder=str(tmp_path / "a")
    )
    steady = run_on_ranks(
        2, resume_in_turn, case=case, kernels=("fused", "fused", "fused"), how=how, folder=str(tmp_path / "b")
    )
    uninterrupted = run_on_ranks(2, train, case=dataclasses.replace(case, kernels=("fused",), steps=9))
    for ours, theirs, third in zip(changing, steady, uninterrupted, strict=True):
        assert theirs["losses"] == third["losses"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
        assert ours["layouts"][0] == ours["layouts"][1] == theirs["layouts"][1]
        for name, expected in theirs["tensors"].items():
            assert_close(ours["tensors"][name], expected, tolerance=TOLERANCE, name=name)
    assert len(set(ours["losses"])) == len(ours["losses"])


def test_loading_restores_weights_and_state_in_place():
    """Trained on, then loaded: all as at the time of saving, and the next losses are the same to the bit."""
    for before, after, loaded in run_on_ranks(1, save_and_load_in_place, case=Case()):
        assert before["losses"] == loaded["losses"]
        for name, expected in before["tensors"].items():
            assert torch.equal(loaded["tensors"][name], expected)
            assert not torch.equal(after["tensors"][name], expected)
