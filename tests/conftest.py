"""Devices, poisoned memory, and an honest word on what did not run.

Kernel tests (marker `interpreter`) run on the GPU where there is one, in Triton's interpreter under
TRITON_INTERPRET=1, and otherwise not at all, which is said. `make test` starts each kind in its own process.
"""

import os

import pytest
import torch

from fbtriton import tlx

HAS_GPU = torch.cuda.is_available()
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if HAS_GPU:
    torch.cuda.init()  # activation checkpointing refuses a forward that is the first to touch the device
if INTERPRET:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
NOT_RUN = (
    ("needs a CUDA GPU", "GPU", "no CUDA GPU here"),
    ("needs TLX", "TLX", "this Triton has none; make test-tlx"),
    ("needs an sm_100 GPU", "Blackwell", "no GPU of sm_100 or later here"),
)


def pytest_addoption(parser):
    parser.addoption("--compile-all", action="store_true", help="compile every kernel variant, not a cover")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("tlx") and not tlx.available():
            item.add_marker(pytest.mark.skip(reason="needs TLX, of Meta's fork of Triton"))
        elif item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.get_closest_marker("interpreter") and not (HAS_GPU or INTERPRET):
            item.add_marker(pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1"))
        elif item.get_closest_marker("compile") and INTERPRET:
            item.add_marker(pytest.mark.skip(reason="Triton compiles nothing under TRITON_INTERPRET=1"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, kind, why in NOT_RUN:
        if count := sum(reason in str(report.longrepr) for report in skipped):
            terminalreporter.write_line(f"{kind} tests NOT RUN: {count} ({why})", yellow=True)
    where = "on " + torch.cuda.get_device_name() if HAS_GPU else "in the interpreter" if INTERPRET else "not at all"
    terminalreporter.write_line(f"kernels ran {where}")


@pytest.fixture
def device():
    """Where kernel tests put their tensors."""
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


@pytest.fixture(params=["reference", pytest.param("kernels", marks=pytest.mark.interpreter)])
def any_device(request):
    """For behaviour that the reference and the kernels share. The reference runs on CPU tensors, in a process that
    does not interpret; the kernels on the GPU, or on CPU tensors in the interpreter."""
    if request.param == "reference":
        if INTERPRET:
            pytest.skip("the reference is tested in the process without TRITON_INTERPRET")
        return torch.device("cpu")
    return torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")


@pytest.fixture
def fbgemm():
    """The Python module of FBGEMM that has its TBE and, in every release, the enums."""
    pytest.importorskip("fbgemm_gpu", reason="needs fbgemm_gpu, which is not installed")
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Memory from torch.empty holds NaN (integers: the largest value), so that a forgotten write shows."""
    previous = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.utils.deterministic.fill_uninitialized_memory = previous[0]
    torch.use_deterministic_algorithms(previous[1])
