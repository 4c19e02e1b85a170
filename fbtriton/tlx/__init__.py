"""TLX, the low-level extensions of Meta's Triton fork: the one place that asks whether they are there."""

from __future__ import annotations

import functools
import importlib.util

from fbtriton._triton import HAS_TRITON


@functools.cache
def available() -> bool:
    """Whether the installed Triton has TLX. Imports nothing of it."""
    if not HAS_TRITON:
        return False
    try:
        return importlib.util.find_spec("triton.language.extra.tlx") is not None
    except ImportError:
        return False
