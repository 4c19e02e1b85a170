"""bench/ranks.py: processes that run functions together."""

import pytest

from bench.ranks import Ranks


@pytest.fixture
def ranks():
    group = Ranks(2)
    yield group
    group.end()


def test_results_come_rank_by_rank(ranks):
    assert ranks.run("os:getpid", timeout=120) == [process.pid for process in ranks.processes]
    assert ranks.run("os:getenv", timeout=120, key="RANK") == ["0", "1"]


def test_a_rank_that_fails_is_named_with_its_traceback(ranks):
    with pytest.raises(RuntimeError, match=r"(?s)rank \d:.*FileNotFoundError"):
        ranks.run("os:listdir", timeout=120, path="/does/not/exist")


def test_a_rank_that_ends_is_noticed(ranks):
    with pytest.raises(RuntimeError, match=r"rank \d ended in os:_exit"):
        ranks.run("os:_exit", timeout=120, status=3)


def test_a_rank_that_is_late_is_noticed(ranks):
    ranks.run("os:getpid", timeout=120)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not return from subprocess:run within 1 s"):
        ranks.run("subprocess:run", timeout=1, args=["sleep", "30"])
