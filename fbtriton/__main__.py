"""`python -m fbtriton info`: what a bug report needs."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import fbtriton
from fbtriton import tlx
from fbtriton._triton import HAS_TRITON
from fbtriton.backward.sort import describe_backend
from fbtriton.config import INTERPRET
from fbtriton.forward.routing import plan
from fbtriton.layout import OperatorSpec

EXAMPLE = OperatorSpec(
    tables=((100_000, 128), (1000, 64)),
    feature_tables=(0, 1),
    pooling="sum",
    weights_dtype="float16",
    output_dtype="float32",
    optimizer="rowwise_adagrad",
    stochastic_rounding=True,
    bounds_check="warning",
)


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def _triton_version() -> str:
    if not HAS_TRITON:
        return "not installed: CPU tensors only"
    import triton

    return triton.__version__ + (" (TRITON_INTERPRET=1: kernels run in the interpreter)" if INTERPRET else "")


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none visible: CPU tensors run the PyTorch reference"
    properties = torch.cuda.get_device_properties(0)
    memory = properties.total_memory / 2**30
    capability = f"{properties.major}.{properties.minor}"
    count = torch.cuda.device_count()
    return (
        f"{count} x {properties.name}, compute capability {capability}, {properties.multi_processor_count}"
        f" multiprocessors, {memory:.0f} GiB, CUDA {torch.version.cuda}"
    )


def info() -> str:
    """Versions, GPU, TLX, sort and the kernel paths, one fact a line."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lines = {
        "fbtriton": fbtriton.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "Triton": _triton_version(),
        "NumPy": _version("numpy"),
        "FBGEMM": _version("fbgemm-gpu", "fbgemm-gpu-cpu"),
        "TorchRec": _version("torchrec"),
        "GPU": _gpu(),
        "TLX": "available" if tlx.available() else "not available: it comes with Meta's Triton fork",
        "sort": describe_backend(device),
    }
    width = max(map(len, lines))
    facts = "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
    tables = ", ".join(f"{rows} x {dim}" for rows, dim in EXAMPLE.tables)
    return f"{facts}\n\npaths for fp16 tables of {tables}:\n{plan(EXAMPLE, device)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fbtriton", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print versions, GPU, and which kernels would run and why")
    parser.parse_args()
    print(info())


if __name__ == "__main__":
    main()
