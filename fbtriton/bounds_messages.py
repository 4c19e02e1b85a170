"""Warnings about bad ids and offsets, without waiting for the device."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from fbtriton.bounds_check import BoundsReport, read_report

FORWARDS_BETWEEN_COPIES = 256  # a copy and its event cost the host as much as a launch or two


class BoundsMessages:
    """Warns (RuntimeWarning) when a report has more than at the last warning.

    A report on a CPU is read after every forward. One on a GPU is copied after the forwards 1, 2, 4, ..., 256, 512,
    768, ..., and a later forward that finds the copy done warns. Nothing happens while a graph is captured.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.said = 0
        self.copying: tuple[Tensor, torch.cuda.Event] | None = None

    def __reduce__(self) -> tuple[type[BoundsMessages], tuple[()]]:
        return BoundsMessages, ()  # a copy or a pickle starts anew

    def after_forward(self, report: Tensor) -> None:
        """report: int64, as `fbtriton.bounds_check` has it; not changed."""
        if report.device.type != "cuda":
            if not report.is_meta:
                self._say(read_report(report))
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if self.copying is not None and self.copying[1].query():
            copied, self.copying = self.copying[0], None
            self._say(read_report(copied))
        self.forwards += 1
        is_due = self.forwards & (self.forwards - 1) == 0 and self.forwards < FORWARDS_BETWEEN_COPIES
        if self.copying is None and (is_due or self.forwards % FORWARDS_BETWEEN_COPIES == 0):
            event = torch.cuda.Event()
            copied = torch.empty(report.shape, dtype=report.dtype, pin_memory=True).copy_(report, non_blocking=True)
            event.record()
            self.copying = copied, event

    def _say(self, report: BoundsReport) -> None:
        found = report.bad_ids + report.bad_offsets
        if found > self.said:
            warnings.warn(str(report), RuntimeWarning, stacklevel=4)
        self.said = found  # less than before if the report was cleared
