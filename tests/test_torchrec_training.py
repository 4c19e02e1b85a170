"""FUSED_TRITON beside FUSED, which is FBGEMM's, in TorchRec's own engine: the same losses, weights and states."""

import dataclasses

import pytest
import torch

from fbtriton.testing import assert_close

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")
from torchrec_models import Case, train
from torchrec_ranks import run_on_ranks

pytestmark = pytest.mark.torchrec

# A few fp32 roundings a step, in another order; the fused optimizer divides by a square root, which halves them.
TOLERANCE = 32 * torch.finfo(torch.float32).eps

SHARDINGS = ("table_wise", "row_wise", "column_wise")
ALIKE = {
    "shared-table": Case(shared=True),
    "sharding": Case(shardings=SHARDINGS),
    "sgd": Case(shardings=SHARDINGS, optimizer="EXACT_SGD"),
    "mean": Case(shardings=SHARDINGS, poolings=("MEAN",)),
    "mixed-pooling": Case(poolings=("SUM", "MEAN")),
    "weighted": Case(shardings=SHARDINGS, weighted=True),
    "int32": Case(
        shardings=SHARDINGS,
        index_dtype=torch.int32,
        fused_params=(("embedding_table_index_type", torch.int32), ("embedding_table_offset_type", torch.int32)),
    ),
    "two-column-shards-in-one-tbe": Case(shardings=("column_wise_here",)),
    "data-parallel": Case(shardings=("data_parallel", "table_wise")),
    "batch-size-of-each-feature": Case(shardings=("table_wise",), batch_sizes=(4, 2, 3)),
    "sequence": Case(shardings=SHARDINGS, sequence=True),
}


def compare(case, world_size, local_size=None):
    ours = run_on_ranks(world_size, train, local_size=local_size, case=case)
    fused = dataclasses.replace(case, kernels=("fused",), fused_everywhere=False)
    theirs = run_on_ranks(world_size, train, local_size=local_size, case=fused)
    assert {kernel for rank in ours for kernel in rank["kernels"]} == {"fbtriton"}
    assert {kernel for rank in theirs for kernel in rank["kernels"]} == {"fbgemm_gpu"}
    for our_rank, their_rank in zip(ours, theirs, strict=True):
        assert our_rank["losses"] == pytest.approx(their_rank["losses"], rel=TOLERANCE)
        assert our_rank["state_keys"] == their_rank["state_keys"]
        for kind in ("weights", "states"):
            assert list(our_rank[kind]) == list(their_rank[kind])
            for name, expected in their_rank[kind].items():
                assert_close(our_rank[kind][name], expected, tolerance=TOLERANCE, name=name)
    assert ours[0]["losses"][0] != ours[0]["losses"][-1]


@pytest.mark.parametrize("name", ALIKE)
def test_trains_like_fused(name):
    compare(ALIKE[name], world_size=2)


def test_trains_like_fused_on_one_rank():
    compare(Case(shardings=("table_wise", "column_wise_here"), poolings=("SUM", "MEAN")), world_size=1)


@pytest.mark.parametrize("sharding", ["table_row_wise", "grid_shard"])
def test_trains_like_fused_on_two_hosts(sharding):
    """Four ranks, two of them on each host. With the wrapper that TorchRec has for FUSED_TRITON, the grid's state has
    the wrong size."""
    compare(Case(shardings=(sharding,), dim=256, steps=2, poolings=("MEAN",)), world_size=4, local_size=2)


def test_sequence_on_one_rank():
    compare(Case(sequence=True, shardings=("table_wise",)), world_size=1)


def test_kernels_may_be_mixed():
    """Each table has the kernel that its plan says, and trains as if all had one."""
    mixed = Case(kernels=("fused_triton", "fused", "fused_triton"), shardings=("row_wise",))
    ours = run_on_ranks(2, train, case=mixed)
    alone = run_on_ranks(2, train, case=dataclasses.replace(mixed, kernels=("fused_triton",)))
    assert ours[0]["kernels"] == ["fbtriton", "fbgemm_gpu"] or ours[0]["kernels"] == ["fbgemm_gpu", "fbtriton"]
    assert ours[0]["losses"] == pytest.approx(alone[0]["losses"], rel=TOLERANCE)
    for name, expected in alone[0]["weights"].items():
        assert_close(ours[0]["weights"][name], expected, tolerance=TOLERANCE, name=name)


def test_install_fused_gives_fused_our_class_and_says_so():
    case = Case(kernels=("fused",), shardings=("table_wise",), fused_everywhere=True)
    ours = run_on_ranks(1, train, case=case)[0]
    theirs = run_on_ranks(1, train, case=dataclasses.replace(case, fused_everywhere=False))[0]
    assert set(ours["kernels"]) == {"fbtriton"} and set(theirs["kernels"]) == {"fbgemm_gpu"}
    assert ours["messages"] == ["fused kernel of tables t0, t1, t2: fbtriton, as install(fused=True) asks"]
    assert theirs["messages"] == [
        "fused kernel of tables t0, t1, t2: FBGEMM: FUSED is FBGEMM's unless install(fused=True)"
    ]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)


def test_install_fused_leaves_to_fbgemm_what_we_lack():
    unsupported = (("uvm_non_rowwise_momentum", True),)
    case = Case(kernels=("fused",), fused_params=unsupported, fused_everywhere=True)
    result = run_on_ranks(1, train, case=case)[0]
    assert set(result["kernels"]) == {"fbgemm_gpu"}
    (message,) = result["messages"]
    assert message.startswith(
        "fused kernel of tables t0, t1, t2: FBGEMM: uvm_non_rowwise_momentum=True is not supported"
    )


def test_what_we_lack_is_refused_with_fused_triton():
    case = Case(fused_params=(("uvm_non_rowwise_momentum", True),))
    with pytest.raises(RuntimeError, match="NotImplementedError: uvm_non_rowwise_momentum=True is not supported"):
        run_on_ranks(1, train, case=case)


@pytest.mark.parametrize("output", ["FP16", "BF16"])
def test_output_dtype(output):
    from fbgemm_gpu.split_embedding_configs import SparseType

    dtype = {"FP16": torch.float16, "BF16": torch.bfloat16}[output]
    case = Case(fused_params=(("output_dtype", SparseType[output]),), steps=1)
    result = run_on_ranks(1, train, case=case)[0]
    plain = run_on_ranks(1, train, case=Case(steps=1))[0]
    assert result["output_dtypes"] == {dtype} and plain["output_dtypes"] == {torch.float32}
    assert result["losses"] == pytest.approx(plain["losses"], rel=4 * torch.finfo(dtype).eps)


def test_stochastic_rounding_of_half_precision_tables():
    """Off, it trains as FUSED does; on, some weights differ, and none by more than a spacing a step."""
    rounded = Case(dtypes=("FP16",), steps=1)
    nearest = dataclasses.replace(rounded, fused_params=(("stochastic_rounding", False),))
    ours, exact = (run_on_ranks(1, train, case=case)[0]["weights"] for case in (rounded, nearest))
    theirs = run_on_ranks(1, train, case=dataclasses.replace(nearest, kernels=("fused",)))[0]["weights"]
    for name, expected in theirs.items():
        spacing = torch.finfo(torch.float16).eps
        assert_close(exact[name].float(), expected.float(), tolerance=spacing, name=name)
        assert_close(ours[name].float(), exact[name].float(), tolerance=spacing, name=name)
        assert not torch.equal(ours[name], exact[name])


def test_any_dim():
    """FBGEMM needs multiples of 4 columns, and TorchRec asserts them for its sake."""
    wide = run_on_ranks(1, train, case=Case(dim=3, num_tables=1))[0]
    assert wide["losses"][0] > wide["losses"][-1]
    with pytest.raises(RuntimeError, match="local_cols=3"):
        run_on_ranks(1, train, case=Case(dim=3, num_tables=1, kernels=("fused",)))


def test_hints_and_fused_bounds_check_change_no_result():
    hints = (("f0", 2), ("f1", 2.5), ("f2", 0))
    case = Case(fused_params=(("bag_size_hints", hints), ("fused_bounds_check", False)))
    ours, plain = run_on_ranks(1, train, case=case)[0], run_on_ranks(1, train, case=Case())[0]
    assert ours["losses"] == plain["losses"]
    assert ours["messages"] == ["fused_triton kernel of tables t0, t1, t2: fbtriton"]
    partial = dataclasses.replace(
        case, fused_params=(("bag_size_hints", hints[:2]),), kernels=("fused_triton", "fused")
    )
    result = run_on_ranks(1, train, case=partial)[0]
    assert result["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert "bag_size_hints: not known to FBGEMM, and without effect on its results" in result["messages"]


@pytest.mark.parametrize("output", ["FP32", "BF16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_sizes_of_each_feature_in_several_tbes(world_size, output):
    """FBGEMM on a CPU fails here, so it is compared with one TBE a rank."""
    from fbgemm_gpu.split_embedding_configs import SparseType

    case = Case(num_tables=4, batch_sizes=(4, 2, 3, 1), fused_params=(("output_dtype", SparseType[output]),))
    several = run_on_ranks(world_size, train, case=dataclasses.replace(case, several_groups=True))
    one = run_on_ranks(world_size, train, case=case)
    for ours, expected in zip(several, one, strict=True):
        assert len(ours["kernels"]) == 2 * len(expected["kernels"])
        assert ours["losses"] == expected["losses"]
        for kind in ("weights", "states"):
            for name, tensor in expected[kind].items():
                assert torch.equal(ours[kind][name], tensor)
