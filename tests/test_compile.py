"""Kernels compile for every GPU without one, spill nothing, and load rows 16 bytes a lane where alignment allows.

Launches are compiled as the launchers make them. Left out of the default run: combinations that differ from these
only in a dtype pair or an arch; `--compile-all` takes them all.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from fbtriton import SGD, Adam, NoOptimizer, RowwiseAdagrad, Table, TableBatchedEmbeddingBags
from fbtriton.config import GatherConfig, force_config, select_long_run, select_short_run
from fbtriton.optim import KINDS, OPTIMIZERS

pytestmark = pytest.mark.compile
SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FLOATS = list(SHORT)
CUDA = [("cuda", 80), ("cuda", 90), ("cuda", 100)]
AMD = [("hip", "gfx942"), ("hip", "gfx950")]
ALL_DIMS = (1, 4, 8, 64, 128, 256, 1024)
DECAY = {"weight_decay": 0.1}
OF_EVERY_VARIANT = {
    optimizer.variant: optimizer
    for optimizer in [
        *(kind(0.1) for kind in KINDS if kind is not NoOptimizer),
        RowwiseAdagrad(0.1, max_norm=1.0),
        RowwiseAdagrad(0.1, weight_decay_mode="l2", **DECAY),
        RowwiseAdagrad(0.1, weight_decay_mode="l2", max_norm=1.0, **DECAY),
        RowwiseAdagrad(0.1, weight_decay_mode="decoupled", **DECAY),
        RowwiseAdagrad(0.1, weight_decay_mode="decoupled", max_norm=1.0, **DECAY),
        NoOptimizer(),
    ]
}


@dataclass(frozen=True)
class Variant:
    dims: tuple[int, ...]
    weights_dtype: torch.dtype = torch.float16
    output_dtype: torch.dtype = torch.float32
    optimizer: str = "rowwise_adagrad"  # a name in OPTIMIZERS
    pooling: str = "sum"
    weighted: bool = False
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    stochastic_rounding: bool = True
    bounds_check: str = "warning"
    fused_bounds_check: bool = True
    vbe: bool = False  # a batch size for each feature

    def __str__(self):
        parts = [f"D{'-'.join(map(str, self.dims))}", SHORT[self.weights_dtype], SHORT[self.output_dtype]]
        parts += [self.optimizer, self.pooling, "weighted"[: 8 * self.weighted], self.bounds_check]
        parts += [str(self.index_dtype)[6:], str(self.offset_dtype)[6:], "sr"[: 2 * self.stochastic_rounding]]
        parts += ["vbe"[: 3 * self.vbe], "separate"[: 8 * (not self.fused_bounds_check)]]
        return "-".join(filter(None, parts))


def compile_variant(variant, backend, arch):
    """Everything that one forward and one backward launch."""
    from fbtriton.compile_only import compile_only

    module = TableBatchedEmbeddingBags(
        [Table(1001, 1), *(Table(1001, dim) for dim in variant.dims)],
        feature_table_map=[*range(1, len(variant.dims) + 1), 0],
        optimizer=OF_EVERY_VARIANT[variant.optimizer],
        pooling=variant.pooling,
        weights_dtype=variant.weights_dtype,
        output_dtype=variant.output_dtype,
        stochastic_rounding=variant.stochastic_rounding,
        bounds_check=variant.bounds_check,
        fused_bounds_check=variant.fused_bounds_check,
        device="cpu",
    )
    num_bags = 2 * (len(variant.dims) + 1)
    length = 2000  # so many entries that long runs could need a level of the tree
    offsets = torch.arange(num_bags + 1, dtype=variant.offset_dtype) * length
    indices = torch.zeros(length * num_bags, dtype=variant.index_dtype)
    weights = torch.rand(indices.numel(), requires_grad=True) if variant.weighted else None
    with compile_only(backend, arch) as kernels:
        batch_sizes = [[2]] * (len(variant.dims) + 1) if variant.vbe else None
        output = module(indices, offsets, weights, batch_sizes=batch_sizes)
        grad = torch.ones_like(output)
        if not variant.vbe:  # a row stride of whole 16 bytes, as with any table of an aligned dim in last place
            grad = grad.new_ones(grad.shape[0], (grad.shape[1] + 7) // 8 * 8)[:, : grad.shape[1]]
        output.backward(grad)
    return kernels


def kernel_names(kernels):
    return {kernel.name for kernel in kernels}


def of(kernels, name, dim):
    """The variants of one kernel for one dim."""
    return [kernel for kernel in kernels if kernel.name == name and dims_of(kernel) == (dim,)]


def dims_of(kernel):
    """The dims of a launch, () if it does not work on rows."""
    names = kernel.src.fn.arg_names
    if "DIMS" in names:
        return tuple(kernel.src.constants[(names.index("DIMS"),)])
    return (kernel.src.constants[(names.index("DIM"),)],) if "DIM" in names else ()


def apart(dims, itemsize=2, scaled=False):
    """Force a launch of its own for each of two dims, which have different numbers of warps."""
    short = {dim: select_short_run("", dim, itemsize, scaled, False) for dim in dims}
    long = {dim: select_long_run(dim) for dim in dims}
    first = dims[0]
    short[first], long[first] = replace(short[first], num_warps=4), replace(long[first], num_warps=4)
    return force_config(short_run=short, long_run=long)


SPILLS_OUTSIDE_LOOPS = 32  # words, such as what waits while a loop runs, or what bad input needs


STAGES = {
    "check_offsets_kernel", "gather_kernel",
    "linearise_kernel", "count_runs_kernel", "write_runs_kernel",
    "short_run_kernel", "grad_accum_kernel", "add_groups_kernel", "apply_kernel",
}  # fmt: skip


def test_programs_of_wide_rows_are_no_larger_than_amd_has():
    """A warp has 64 lanes there, and a program at most 1024."""
    kernels = compile_variant(Variant((4096,)), *AMD[0])
    assert kernel_names(kernels) == STAGES
    assert max(kernel.metadata.num_warps for kernel in kernels) == 16


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype, dim", [(torch.float16, 128), (torch.bfloat16, 64), (torch.float32, 64)], ids=str)
def test_rows_are_loaded_16_bytes_a_lane(dtype, dim, arch):
    """Behind a table of 1001 x 1 elements, whose end is not a multiple of 16 bytes."""
    from fbtriton.compile_only import load_widths, resources

    with apart([1, dim], dtype.itemsize, scaled=True):
        kernels = compile_variant(Variant((dim,), dtype, weighted=True), "cuda", arch)
    assert kernel_names(kernels) == STAGES | {"sample_weights_grad_kernel"}
    for name in ("gather_kernel", "sample_weights_grad_kernel", "short_run_kernel", "apply_kernel"):
        (kernel,) = of(kernels, name, dim)
        widths = load_widths(kernel)
        assert widths["LDG.E.128"] > 0, (name, widths)
        assert not any("U16" in width for width in widths), (name, widths)
        assert resources(kernel).loop_spills == 0, name


@pytest.mark.parametrize("arch", [90, 100])
def test_gradients_are_loaded_16_bytes_a_lane(arch):
    """Where columns and row stride of the gradient allow it, and a row has as much for each lane of a warp."""
    from fbtriton.compile_only import compile_only, load_widths

    for dim in (128, 256):
        module = TableBatchedEmbeddingBags([Table(1000, dim)], optimizer=SGD(0.1), device="cpu")
        offsets, indices = torch.arange(3) * 20, torch.zeros(40, dtype=torch.int64)
        with compile_only("cuda", arch) as kernels:
            module(indices, offsets).backward(torch.ones(2, dim))
        (kernel,) = of(kernels, "grad_accum_kernel", dim)
        assert load_widths(kernel)["LDG.E.128"] > 0


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("bags, rows, unroll, warps", [(4, 1, 4, 1), (4, 2, 2, 1), (16, 1, 2, 4), (1, 8, 1, 1)])
def test_gather_configurations(bags, rows, unroll, warps, arch):
    """Rows are loaded 16 bytes a lane, and nothing spills."""
    from fbtriton.compile_only import load_widths, resources

    config = GatherConfig(bags_per_program=bags, rows_per_bag=rows, num_warps=warps, unroll=unroll)
    with force_config(gather=config):
        (kernel,) = of(compile_variant(Variant((128,)), "cuda", arch), "gather_kernel", 128)
    widths = load_widths(kernel)
    assert widths["LDG.E.128"] >= unroll and not any("U16" in width for width in widths), widths
    assert resources(kernel).loop_spills == 0


def pairwise_cover():
    """Variants in which every two values of two options meet at least once (a greedy cover)."""
    options = {
        "dims": [(1,), (4,), (20,), (64,), (128,), (8, 256), (1024,)],
        "weights_dtype": FLOATS,
        "output_dtype": FLOATS,
        "optimizer": ["sgd", "rowwise_adagrad", "adam", "partial_rowwise_lamb"],  # the others: test_optimizers
        "pooling": ["sum", "mean"],
        "weighted": [False, True],
        "index_dtype": [torch.int32, torch.int64],
        "offset_dtype": [torch.int32, torch.int64],
        "stochastic_rounding": [False, True],
        "bounds_check": ["off", "ignore", "warning", "fatal"],
        "fused_bounds_check": [True, False],
        "vbe": [False, True],
    }
    names = list(options)
    pairs = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    generator = torch.Generator().manual_seed(0)
    while pairs:
        candidates = [
            {n: v[int(torch.randint(len(v), (), generator=generator))] for n, v in options.items()} for _ in range(60)
        ]
        covers = [{((a, c[a]), (b, c[b])) for a, b in itertools.combinations(names, 2)} & pairs for c in candidates]
        best = max(range(len(candidates)), key=lambda i: len(covers[i]))
        pairs -= covers[best]
        if covers[best]:
            yield Variant(**candidates[best])


@pytest.mark.parametrize("variant", list(pairwise_cover()), ids=str)
def test_cover_compiles(variant):
    from fbtriton.compile_only import resources

    for backend, arch in CUDA:
        for kernel in compile_variant(variant, backend, arch):
            used = resources(kernel)
            assert used.spills <= SPILLS_OUTSIDE_LOOPS * max(1, len(dims_of(kernel))), (kernel.name, arch, used)
            assert used.loop_spills == 0 or arch < 90, (kernel.name, arch, used)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "none"])
def test_optimizers(optimizer):
    """Rows and states with one element per weight are loaded 16 bytes a lane, and nothing spills in a loop."""
    from fbtriton.compile_only import load_widths, resources

    for arch, dtype in ((90, torch.float16), (100, torch.float32)):
        with apart([1, 128], dtype.itemsize):
            kernels = compile_variant(Variant((128,), dtype, optimizer=optimizer), "cuda", arch)
        for name in ("short_run_kernel", "apply_kernel"):
            (kernel,) = of(kernels, name, 128)
            widths = load_widths(kernel)
            assert widths["LDG.E.128"] > 0 and not any("U16" in width for width in widths), (name, widths)
            used = resources(kernel)
            allowed = 2 * SPILLS_OUTSIDE_LOOPS  # as for the launch that does both dims, where they are not forced apart
            assert used.loop_spills == 0 and used.spills <= allowed, (name, arch, dtype, used)


def test_no_optimizer():
    """Neither rows nor states are loaded: what is left are gradients, and the table of runs."""
    from fbtriton.compile_only import compile_only, load_widths, resources

    module = TableBatchedEmbeddingBags([Table(100, 128)], optimizer=NoOptimizer(), weights_dtype=torch.float16)
    with compile_only("cuda", 90) as kernels:
        indices, offsets = torch.zeros(4000, dtype=torch.int64), torch.arange(3) * 2000
        module(indices, offsets, total_unique_indices=1).backward(torch.ones(2, 128, dtype=torch.float32))
    (kernel,) = of(kernels, "apply_kernel", 128)
    with apart([1, 128]):
        with_sgd = compile_variant(Variant((128,), optimizer="sgd"), "cuda", 90)
    (other,) = of(with_sgd, "apply_kernel", 128)
    assert sum(load_widths(kernel).values()) < sum(load_widths(other).values())
    assert all(resources(kernel).loop_spills == 0 for kernel in kernels)


@pytest.mark.parametrize("dtype, dim", [(torch.float16, 128), (torch.float32, 64), (torch.bfloat16, 1024)], ids=str)
def test_bf16_states_compile(dtype, dim):
    """Of Adam, whose two states are as large as the weights."""
    from fbtriton.compile_only import compile_only, resources

    adam = Adam(0.1, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    module = TableBatchedEmbeddingBags([Table(100, dim)], optimizer=adam, weights_dtype=dtype, device="cpu")
    with compile_only("cuda", 90) as kernels:
        module(torch.zeros(160, dtype=torch.int64), torch.arange(3) * 80).sum().backward()
    for kernel in kernels:
        assert resources(kernel).loop_spills == 0, kernel.name


@pytest.mark.parametrize("backend, arch", AMD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amd_sample_compiles(backend, arch, dtype):
    kernels = compile_variant(Variant((8, 128), dtype, weighted=True), backend, arch)
    assert kernel_names(kernels) >= STAGES
    assert all(kernel.asm["hsaco"] for kernel in kernels)


def every_variant():
    return [
        Variant((dim,), weights, output, optimizer, pooling, weighted, index, index, stochastic)
        for dim, weights, output, optimizer, pooling, weighted, index, stochastic in itertools.product(
            ALL_DIMS, FLOATS, FLOATS, ["sgd", "rowwise_adagrad"], ["sum", "mean"], [False, True],
            [torch.int32, torch.int64], [False, True],
        )
    ]  # fmt: skip


def test_everything_compiles(request):
    """Hours on two cores without a warm cache: `make compile-all`."""
    if not request.config.getoption("--compile-all"):
        pytest.skip("takes long; run make compile-all")
    for variant, (backend, arch) in itertools.product(every_variant(), CUDA):
        compile_variant(variant, backend, arch)
