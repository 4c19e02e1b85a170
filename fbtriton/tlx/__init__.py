"""TLX, the low-level extensions of Meta's Triton fork: the one place that asks whether they are there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from fbtriton._triton import HAS_TRITON

NAME = "triton.language.extra.tlx"


@functools.cache
def available() -> bool:
    """Whether the installed Triton has TLX. Imports nothing of it."""
    if not HAS_TRITON:
        return False
    try:
        return importlib.util.find_spec(NAME) is not None
    except ImportError:
        return False


@functools.cache
def language() -> Any:
    """TLX for kernels to name; None where it is missing, and then no kernel may reach those names."""
    return importlib.import_module(NAME) if available() else None
