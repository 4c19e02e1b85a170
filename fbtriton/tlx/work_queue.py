"""Handing out work to programs: a grid of fixed size, or cluster launch control (CLC, sm_100 and later).

    queue = open_queue(CLC, REVISION)
    tile, phase = tl.program_id(0), 0
    while tile >= 0:
        ask(queue)                      # for the next tile, which is on its way while this one is done
        for item in range(begin + tile, end, tl.num_programs(0)):
            ...
        tile = answer(queue, phase)     # -1: nothing is left
        phase ^= 1

Without CLC the loop runs once, and a tile is a program's interleaved share of the items. With CLC there are more tiles
than programs that fit on the GPU: a program that is done cancels the launch of one that has not started and does its
tile instead, so that programs with short items take more tiles. Either way each tile is done once, by somebody.

These functions run while Triton traces a kernel. A jit function could not stand for them: the response of CLC loses
its type on the way through a call.

Order, for the one response buffer and the one barrier. The response is written by the asynchronous proxy, read by all
threads, and then written again.

    1  mbarrier.init by one thread; fence.proxy.async; bar.sync   the barrier is there for all threads and for CLC
    2  mbarrier.arrive.expect_tx and try_cancel by one thread     CLC writes 16 bytes, then completes the phase
    3  mbarrier.try_wait.parity by all threads                    acquires: the response is there
    4  ld.shared and query_cancel by all threads
    5  fence.proxy.async, then bar.sync                           every thread's read comes before the next write
    6  from 2 on, unless nothing was left: asking again after that is undefined, and the loop has ended
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fbtriton._triton import HAS_TRITON, tl
from fbtriton.config import INTERPRET
from fbtriton.tlx import language

tlx = language()
RESPONSE_BYTES = 16

# Triton's cache looks into jit functions only: as an argument of open_queue, this tells it of changes to this file.
REVISION = tl.constexpr(zlib.crc32(Path(__file__).read_bytes()))


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a kernel call the function while it is traced; in the interpreter it is called as it is."""
    return tl.core.builtin(function) if HAS_TRITON and not INTERPRET else function


@traced
def open_queue(clc: Any, revision: Any, _semantic: Any = None) -> Any:
    """The queue of one program, or None where the grid is fixed."""
    if not tl.core._unwrap_if_constexpr(clc):
        return None
    barrier = tlx.alloc_barriers(tl.constexpr(1), _semantic=_semantic)
    response = tlx._alloc_clc_responses(tl.constexpr(1), _semantic=_semantic)
    tlx.fence(tl.constexpr("async_shared"), _semantic=_semantic)
    tl.debug_barrier(_semantic=_semantic)
    return tl.tuple([barrier, response])


def _parts(queue: Any, _semantic: Any) -> Any:
    """Barrier and response, or None where the grid is fixed."""
    if not isinstance(queue, tl.tuple):
        return None
    return [tlx.local_view(part, 0, _semantic=_semantic) for part in queue]


@traced
def ask(queue: Any, _semantic: Any = None) -> None:
    """Ask for another tile, without waiting for the answer."""
    if parts := _parts(queue, _semantic):
        barrier, response = parts
        tlx.barrier_expect_bytes(barrier, tl.constexpr(RESPONSE_BYTES), _semantic=_semantic)
        tlx._clc_issue(response, barrier, _semantic=_semantic)


@traced
def answer(queue: Any, phase: Any, _semantic: Any = None) -> Any:
    """The tile asked for, or -1. phase: 0 at the first answer, 1 at the second, 0 at the third, ..."""
    parts = _parts(queue, _semantic)
    if parts is None:
        return -1 if _semantic is None else tl.full([], -1, tl.int32, _semantic=_semantic)
    barrier, response = parts
    tlx.barrier_wait(barrier, phase, _semantic=_semantic)
    tile = tlx._clc_query(response, _semantic=_semantic)[0]
    tlx.fence(tl.constexpr("async_shared"), _semantic=_semantic)
    tl.debug_barrier(_semantic=_semantic)
    return tile
