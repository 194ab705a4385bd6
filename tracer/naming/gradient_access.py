"""Which threads may look at the gradients of parameters.

To read ``.grad`` while another thread sets it, be it autograd's engine, which does so without the
interpreter, or ``zero_grad``, ends the job in a segmentation fault. So only that thread may look
which trains, as long as no other one does.
"""

from __future__ import annotations

import threading


class GradientAccess:
    """Knows who trains."""

    def __init__(self) -> None:
        self._trainers: set[int] = set()
        self._of_engine: set[int] = set()

    def note_pass(self) -> None:
        """This thread is about to run a backward pass: it trains, or is the engine's, nested."""
        ident = threading.get_ident()
        if ident not in self._of_engine:
            self._trainers.add(ident)

    def note_gradient(self) -> None:
        """A gradient has become ready on this thread: it trains, or is the engine's."""
        ident = threading.get_ident()
        if ident not in self._trainers:
            self._of_engine.add(ident)

    @property
    def trainer(self) -> int | None:
        """The thread that trains; None if there is none yet, or several."""
        return min(self._trainers) if len(self._trainers) == 1 else None

    def may_look(self) -> bool:
        """Whether this thread may look at any gradient."""
        ident = threading.get_ident()
        if not self._trainers:
            return ident == threading.main_thread().ident
        return len(self._trainers) == 1 and ident in self._trainers

    def may_look_at_ready(self) -> bool:
        """Whether this thread may look at those that have become ready in this pass.

        An engine's thread runs while the one that trains waits for it; but those of other devices
        may be at other gradients.
        """
        only_one = len(self._trainers) == 1
        return (only_one and threading.get_ident() in self._of_engine) or self.may_look()
