"""Decides which threads may read the gradients of parameters.

Reading ``.grad`` while another thread sets it ends the job with a segmentation fault: autograd's
engine sets it without holding the interpreter lock, and ``zero_grad`` may, too. Therefore only the
thread that trains may read gradients, and only while no other thread trains.
"""

from __future__ import annotations

import threading


class GradientAccess:
    """Tracks which thread trains."""

    def __init__(self) -> None:
        self._trainers: set[int] = set()
        self._of_engine: set[int] = set()

    def note_pass(self) -> None:
        """Notes that this thread starts a backward pass: it trains, or it is a nested engine's."""
        ident = threading.get_ident()
        if ident not in self._of_engine:
            self._trainers.add(ident)

    def note_gradient(self) -> None:
        """Notes that a gradient became ready on this thread: it trains, or it is the engine's."""
        ident = threading.get_ident()
        if ident not in self._trainers:
            self._of_engine.add(ident)

    @property
    def trainer(self) -> int | None:
        """The thread that trains; None if there is none yet, or more than one."""
        return min(self._trainers) if len(self._trainers) == 1 else None

    def may_read(self) -> bool:
        """Whether this thread may read any gradient."""
        ident = threading.get_ident()
        if not self._trainers:
            return ident == threading.main_thread().ident
        return len(self._trainers) == 1 and ident in self._trainers

    def may_read_ready(self) -> bool:
        """Whether this thread may read the gradients that became ready in this pass.

        A thread of the engine runs while the training thread waits for it, but engine threads of
        other devices may be setting other gradients.
        """
        only_one = len(self._trainers) == 1
        return (only_one and threading.get_ident() in self._of_engine) or self.may_read()
