"""What the tests of the benchmark share."""

import pytest
import torch

from bench.providers import PROVIDERS
from fbtriton.config import INTERPRET


@pytest.fixture(autouse=True)
def right_process(request):
    if INTERPRET and not torch.cuda.is_available() and not request.node.get_closest_marker("interpreter"):
        pytest.skip("runs in the process without TRITON_INTERPRET")


def job_for(workload, provider, kind="cpu", **other):
    job = {"kind": kind, "workload": workload.to_dict(), "provider": provider, "ids": "int64", "setting": ""}
    job["setting"] = PROVIDERS[provider].settings[-1]
    return job | {"device": "cpu", "requests": 2, "repetitions": 2, "seed": 1} | other


def spread(value, share=0.01):
    return {"median": value, "low": value * (1 - share), "high": value * (1 + share), "n": 5}
