"""Triton where it is installed; elsewhere stand-ins that let the modules with kernels be imported.

Without Triton (macOS, Windows) CPU tensors still work: no kernel is ever launched for them.
"""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.runtime import driver

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


def has_launch_hooks() -> bool:
    """Whether somebody, such as a profiler, is told of every launch."""
    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


def current_stream(device: int) -> int:
    """The handle of PyTorch's current stream on a device, by number."""
    return driver.active.get_current_stream(device)  # type: ignore[no-any-return]


__all__ = ["HAS_TRITON", "current_stream", "has_launch_hooks", "tl", "triton"]
