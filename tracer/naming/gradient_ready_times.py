"""When gradients became ready, as taken down without Python.

A function of Python for each parameter takes the interpreter between two layers of the backward
pass, with none of its code in a cache: a hundred of them in a step cost more than all layers. So
`native/gradients.cpp` takes down the times, and the writer's thread brings them to where the
functions would have put them; or whoever asks which gradients are ready.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.record.recorder import FLAT_CELLS

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.naming.ready_gradients import ReadyGradients
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.record.recorder import Recorder

# Of NativeLibrary.gradient_control.
_WRITTEN: Final = 0
_MISSED: Final = 1
_PAUSED: Final = 2
_NEWEST_NS: Final = 3
# Of NativeLibrary.gradients.
_NONE: Final = -1


class NativeGradients:
    """Watches leaves without Python, and collects what was seen of them.

    Args:
        library: What watches.
        recorder: Where the rows go.
        ready: Where the parameters are noted as ready.
        detailed: Whether there are rows at all.
    """

    def __init__(
        self, library: NativeLibrary, recorder: Recorder, ready: ReadyGradients, *, detailed: bool
    ) -> None:
        self._watch = library.watch_gradient
        self._control = library.gradient_control
        self._rows = library.gradients
        self._room = len(self._rows) // FLAT_CELLS
        self._none = memoryview(array("q", [_NONE]) * self._room)
        self._recorder = recorder
        self._ready = ready
        self._detailed = detailed
        self._taken = self._control[_WRITTEN]
        self._noted = self._taken
        self._missed = self._control[_MISSED]
        # The ids for which each is: a leaf may hold several parameters.
        self._watched: WeakIdentityMap[torch.Tensor, list[int]] = WeakIdentityMap()
        self._backward_began = self._step_ended = self._taken
        # Reentrant: a signal handler of the job may train in the middle of our code. Two, for the
        # job's thread is not to wait for all that the writer's does.
        self._collecting = threading.RLock()
        self._noting = threading.RLock()
        self._abandoned = False

    def watch(self, tensor: int, leaf: torch.Tensor, site: int) -> bool:
        """Takes down from now on when the gradient of a leaf is ready.

        Args:
            tensor: The leaf's id.
            leaf: A parameter.
            site: Where its gradients are recorded.

        Returns:
            Whether it does; else a function of Python has to.
        """
        import torch

        # Subclasses have a way of their own to be called.
        if type(leaf) not in (torch.nn.Parameter, torch.Tensor) or leaf.device.type != "cpu":
            return False
        if not self._watch(leaf._cdata, site):
            return False
        self._watched.set(leaf, [*(self._watched.get(leaf) or ()), tensor])
        return True

    def forget(self, leaf: torch.Tensor) -> list[int]:
        """Lets go of a leaf, whose one hook is to be another.

        Args:
            leaf: Any tensor.

        Returns:
            The ids that it was watched for.
        """
        return self._watched.pop(leaf) or []

    def remember(self, leaf: torch.Tensor, tensors: list[int]) -> None:
        """Takes up a leaf again whose hook it still has.

        Args:
            leaf: What `forget` was given.
            tensors: What it returned.
        """
        if tensors:
            self._watched.set(leaf, tensors)

    def moved(self) -> list[torch.Tensor]:
        """Leaves that have left the CPU since: of them, the device's time is told, too."""
        return [leaf for leaf in self._watched.things() if leaf.device.type != "cpu"]

    def begin_backward(self, *, paused: bool) -> None:
        """A backward pass begins, in which nothing is ready yet.

        Args:
            paused: Nothing is to be taken down in it.
        """
        control = self._control
        if control[_WRITTEN] - self._taken > self._room // 2:
            self.collect()  # the writer does not come to it
        with self._noting:
            self._ready.in_backward.clear()
            self._backward_began = control[_WRITTEN]
        control[_PAUSED] = paused
        control[_NEWEST_NS] = 0

    def end_step(self) -> None:
        """Forgets what is ready now."""
        with self._noting:
            self._ready.latest.clear()
            self._step_ended = self._control[_WRITTEN]

    @property
    def newest_ns(self) -> int:
        """When the newest gradient of this backward pass became ready; 0 if none has."""
        newest_ns: int = self._control[_NEWEST_NS]
        return newest_ns

    @property
    def has_news(self) -> bool:
        """Whether something became ready since the last `collect`."""
        return bool(self._control[_WRITTEN] != self._noted)

    def filled(self) -> float:
        """Which share of the ring is used."""
        return (self._control[_WRITTEN] - self._taken) / self._room

    def collect(self) -> None:
        """Brings the gradients that became ready since the last call to recorder and `ready`."""
        if not self.has_news:
            return  # and no other thread is at it
        with self._collecting:
            while not self._abandoned and self._control[_WRITTEN] != self._taken:
                begin = self._taken % self._room
                end = min(begin + self._control[_WRITTEN] - self._taken, self._room)
                sites = self._rows[FLAT_CELLS * begin : FLAT_CELLS * end : FLAT_CELLS].tolist()
                if _NONE in sites:
                    del sites[sites.index(_NONE) :]  # another thread is still writing it
                if not sites:
                    return
                first, self._taken = self._taken, self._taken + len(sites)
                taken = self._rows[FLAT_CELLS * begin : FLAT_CELLS * (begin + len(sites))]
                if self._detailed:
                    self._recorder.add_rows(taken)
                taken[::FLAT_CELLS] = self._none[: len(sites)]
                self._note(first, sites)
                self._noted = self._taken

    def _note(self, first: int, sites: list[int]) -> None:
        """Notes as ready what is.

        Args:
            first: The number of the first among all.
            sites: Of all from there.
        """
        recorder, ready = self._recorder, self._ready
        if self._detailed:
            lost = self._control[_MISSED] - self._missed
            self._missed += lost
            recorder.dropped += lost
        known = recorder.sites
        tensors = [known[site][2] for site in sites]
        with self._noting:
            ready.trained.update(tensors)
            ready.latest.extend(tensors[max(0, self._step_ended - first) :])
            ready.in_backward.extend(tensors[max(0, self._backward_began - first) :])

    def abandon(self) -> None:
        """In a forked child: another thread may have been at it when the fork came."""
        self._abandoned = True
        self._collecting = threading.RLock()
        self._noting = threading.RLock()
        self._control[_PAUSED] = True
