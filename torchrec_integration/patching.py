"""Replacing what other modules hold, so that it can be undone."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("torchrec_integration")


class Patches:
    """Replacements made in another package; `undo` puts everything back, the last first.

    Modules bind what they import under names of their own, so an object is replaced in every module of the package that
    holds it. A module that is imported in between may hold a replacement: `undo` looks through all of them again.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._undo: list[Callable[[], object]] = []

    def replace_everywhere(self, original: Any, replacement: Any) -> None:
        """Let every name in the package's modules that is bound to `original` be bound to `replacement`.

        Raises:
            RuntimeError: no module holds it.
        """
        if not self._rebind(original, replacement):
            raise RuntimeError(f"no module of {self.package} holds {original!r}")
        self._undo.append(functools.partial(self._rebind, replacement, original))

    def replace_attribute(self, owner: Any, name: str, replacement: Any) -> None:
        """Let owner.name be `replacement`."""
        original = getattr(owner, name)
        setattr(owner, name, replacement)

        def restore() -> None:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)
            else:
                logger.warning("%s.%s was replaced by others after install, and is left as it is", owner, name)

        self._undo.append(restore)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _rebind(self, old: Any, new: Any) -> int:
        found = 0
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] != self.package or module is None:
                continue
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
                    found += 1
        return found
