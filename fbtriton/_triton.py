"""Triton where it is installed; elsewhere stand-ins that let the modules with kernels be imported.

Without Triton (macOS, Windows) CPU tensors still work: no kernel is ever launched for them.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _NoTriton:
        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Any = None, **options: Any) -> Any:
            return function if function is not None else (lambda decorated: decorated)

    triton = tl = _NoTriton()  # type: ignore[assignment]
    JITFunction = _NoTriton  # type: ignore[misc]

__all__ = ["HAS_TRITON", "JITFunction", "tl", "triton"]
