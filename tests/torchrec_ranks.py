"""Ranks that stay from test to test, for tests of TorchRec.

A rank takes seconds to import TorchRec, so a pytest process keeps its ranks. Where a function fails, or does not come
back, all ranks of the group are ended and the next test gets new ones.
"""

from bench.ranks import Ranks

MOST_RANKS = 4  # of one pytest process; each takes some 400 MB
TIMEOUT = 120  # seconds, for any function of any test; most take one

_groups = {}


def run_on_ranks(world_size, function, *, local_size=None, **arguments):
    """function(**arguments), of a module that can be imported, on each of world_size ranks -> their results."""
    key = world_size, local_size or world_size
    if key not in _groups:
        if sum(size for size, _ in [*_groups, key]) > MOST_RANKS:
            end_all()
        _groups[key] = Ranks(*key, device="any", timeout=TIMEOUT, prepare=fill_memory)
    try:
        return _groups[key].run(function, timeout=TIMEOUT, **arguments)
    except BaseException:
        _groups.pop(key).end()
        raise


def end_all():
    while _groups:
        _groups.popitem()[1].end()


def fill_memory():
    """As conftest.py has it."""
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
