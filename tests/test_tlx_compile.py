"""The machine code of long runs in one launch, for GPUs that need not be present: resources, and the order in which
fences, barriers, counters and bulk operations stand. `fbtriton/tlx/fused_long_run.py` argues with that order.

A plain Triton compiles the fixed grid with ordered slots; the rest needs the fork. Left out of the grid: dtypes and
optimizers, which are the device functions of the other paths and are compiled in test_compile.py.
"""

import re

import pytest
import torch

from fbtriton import SGD, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.config import FusedConfig, force_config

pytestmark = pytest.mark.compile
SPILLS_OUTSIDE_LOOPS = 32  # words, as in test_compile.py


def compile_fused(fused, arch, dim=128, optimizer="rowwise_adagrad", weighted=False, dtype=torch.float16):
    """What the backward launches for one table, as `fused` says."""
    from fbtriton.compile_only import compile_only

    module = TableBatchedEmbeddingBags(
        [Table(1001, dim)],
        optimizer=SGD(0.1) if optimizer == "sgd" else RowwiseAdagrad(0.1),
        weights_dtype=dtype,
        device="cpu",
    )
    indices, offsets = torch.zeros(4000, dtype=torch.int64), torch.tensor([0, 2000, 4000])
    weights = torch.rand(4000) if weighted else None
    with force_config(fused=fused), compile_only("cuda", arch) as kernels:
        output = module(indices, offsets, weights)
        output.backward(torch.ones(2, (dim + 7) // 8 * 8)[:, :dim])
    by_name = {kernel.name: kernel for kernel in kernels}
    assert not {"grad_accum_kernel", "add_groups_kernel", "apply_kernel"} & set(by_name)
    return by_name


def code_lines(text):
    """Instructions and labels, one a line, without comments and directives."""
    without_comments = re.sub(r"//.*", "", text)
    lines = (line.strip() for line in re.split(r"[\n;]", without_comments))
    return [line for line in lines if line and not line.startswith(".")]


def assert_order(lines, patterns):
    """Each pattern is found somewhere behind the one before it."""
    position = 0
    for pattern in patterns:
        found = next((n for n in range(position, len(lines)) if re.search(pattern, lines[n])), None)
        assert found is not None, f"no {pattern!r} after line {position} of:\n" + "\n".join(lines[position:][:80])
        position = found + 1


def count(lines, pattern):
    return sum(bool(re.search(pattern, line)) for line in lines)


def between(lines, first, last):
    """The lines from the last one that matches `first` before `last` up to there."""
    end = next(n for n, line in enumerate(lines) if re.search(last, line))
    begin = max(n for n in range(end) if re.search(first, lines[n]))
    return lines[begin : end + 1]


BARRIER = r"\b(bar\.sync|bar\.warp\.sync|barrier\.sync|barrier\.cta\.sync)\b"
ARRIVE = r"atom\.global\.gpu\.acq_rel\.add\.u32|atom\.acq_rel\.gpu\.global\.add"
STORE, LOAD = r"\bst\.global", r"\bld\.global"
SASS_BARRIER = r"\bBAR\.SYNC|WARPSYNC"
SASS_ARRIVE = [r"MEMBAR\S*\.GPU", r"ATOMG\.E\.ADD\.STRONG\.GPU", r"CCTL\.IVALL"]


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("warps", [1, 4])
def test_order_of_ordered_slots(arch, warps):
    """Slot, barrier, counter, barrier, loads: with any Triton. Wide rows take more warps."""
    kernel = compile_fused(FusedConfig(), arch, dim={1: 128, 4: 2048}[warps])["fused_long_run_kernel"]
    assert kernel.metadata.num_warps == warps
    ptx = code_lines(kernel.asm["ptx"])
    assert_order(ptx, [r"st\.global.*v4", BARRIER, ARRIVE, BARRIER, LOAD])
    assert count(between(ptx, STORE, ARRIVE), BARRIER) >= 1, "a barrier between the slot and the counter"
    after = ptx[next(n for n, line in enumerate(ptx) if re.search(ARRIVE, line)) :]
    assert_order(after, [BARRIER, BARRIER, r"ld\.global.*v4", BARRIER, r"st\.global.*v4"])
    assert count(ptx, r"\.nc\b") == 0, "loads past the coherent path"
    assert_order(code_lines(kernel.asm["sass"]), [r"STG\.E\.128", SASS_BARRIER, *SASS_ARRIVE, SASS_BARRIER, "LDG"])


@pytest.mark.tlx
@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize("clc", [False, True])
def test_order_of_sums_by_tma(arch, clc):
    """The sums are in global memory, not only out of shared memory, before the counter moves."""
    if clc and arch < 100:
        pytest.skip("cluster launch control exists from sm_100 on")
    kernels = compile_fused(FusedConfig(clc=clc, reduce=True), arch)
    kernel = kernels["fused_long_run_kernel"]
    ptx = code_lines(kernel.asm["ptx"])
    order = [
        r"st\.shared", r"fence\.proxy\.async", BARRIER,
        r"cp\.reduce\.async\.bulk.*\.add", r"cp\.async\.bulk\.commit_group", r"cp\.async\.bulk\.wait_group 0",
        r"fence\.proxy\.async", BARRIER, ARRIVE, BARRIER, r"ld\.shared", BARRIER,
    ]  # fmt: skip
    assert_order(ptx, order)
    assert count(ptx, r"cp\.reduce\.async\.bulk") == 1 and count(ptx, ARRIVE) == 1
    assert count(between(ptx, r"cp\.reduce", ARRIVE), r"cp\.async\.bulk\.wait_group\s+0") == 1
    assert count(ptx, r"\.nc\b") == 0
    flushed = [r"UTMAREDG.*\.ADD", "UTMACMDFLUSH", r"DEPBAR", SASS_BARRIER, *SASS_ARRIVE, SASS_BARRIER, r"LDG"]
    assert_order(code_lines(kernel.asm["sass"]), flushed)
    assert "clear_rows_kernel" in kernels


@pytest.mark.tlx
@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("reduce", [False, True])
def test_order_of_the_queue(arch, reduce):
    """Ask before the work and read the answer behind it; every read comes before the next request."""
    kernel = compile_fused(FusedConfig(clc=True, reduce=reduce), arch)["fused_long_run_kernel"]
    ptx = code_lines(kernel.asm["ptx"])
    assert_order(ptx, [r"mbarrier\.init", r"fence\.proxy\.async", BARRIER, r"mbarrier\.arrive\.expect_tx"])
    assert_order(ptx, [r"mbarrier\.arrive\.expect_tx", BARRIER, r"clusterlaunchcontrol\.try_cancel"])
    query = [r"mbarrier\.try_wait\.parity", r"ld\.shared\.b128", r"query_cancel\.is_canceled", r"get_first_ctaid"]
    assert_order(ptx, [*query, r"fence\.proxy\.async", BARRIER])
    for instruction in ("try_cancel", "is_canceled", "get_first_ctaid"):
        assert count(ptx, rf"clusterlaunchcontrol.*{instruction}") == 1
    sass = code_lines(kernel.asm["sass"])
    assert_order(sass, ["SYNCS.EXCH", "FENCE.VIEW.ASYNC", SASS_BARRIER, "SYNCS.ARRIVE", "UGETNEXTWORKID"])
    assert_order(sass, ["SYNCS.PHASECHK", r"LDS\.128", "FENCE.VIEW.ASYNC", SASS_BARRIER])


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("clc", [False, pytest.param(True, marks=pytest.mark.tlx)])
@pytest.mark.parametrize("reduce", [False, pytest.param(True, marks=pytest.mark.tlx)])
@pytest.mark.parametrize(
    "dim, optimizer, weighted", [(20, "sgd", False), (64, "rowwise_adagrad", True), (256, "sgd", True)]
)
def test_resources(arch, clc, reduce, dim, optimizer, weighted):
    """Nothing spills in a loop, gradients and rows are loaded 16 bytes a lane, shared memory stays small."""
    from fbtriton.compile_only import load_widths, resources

    if clc and arch < 100:
        pytest.skip("cluster launch control exists from sm_100 on")
    kernel = compile_fused(FusedConfig(clc=clc, reduce=reduce), arch, dim, optimizer, weighted)["fused_long_run_kernel"]
    used = resources(kernel)
    assert used.loop_spills == 0 and used.spills <= SPILLS_OUTSIDE_LOOPS, used
    assert load_widths(kernel)["LDG.E.128"] > 0 or dim == 20
    assert used.shared_bytes <= 4096 + 4 * 256, used
