"""Records in C++ when gradients become ready.

A Python hook for each parameter takes the interpreter lock between two layers of the backward
pass, with cold caches: a hundred of them in a step cost more than all layers. Instead,
`native/gradients.cpp` stores the times. The writer's thread, or whichever caller first asks which
gradients are ready, moves them to where Python hooks would have put them.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Final

from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.native.layout import GRADIENT, GRADIENT_CONTROL
from ddltrace.tracer.record.recorder import FLAT_CELLS

if TYPE_CHECKING:
    import torch

    from ddltrace.tracer.naming.ready_gradients import ReadyGradients
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.record.recorder import Recorder

_WRITTEN: Final = GRADIENT_CONTROL["written"]
_MISSED: Final = GRADIENT_CONTROL["missed"]
_PAUSED: Final = GRADIENT_CONTROL["paused"]
_NEWEST_NS: Final = GRADIENT_CONTROL["newest_ns"]
_NONE: Final = -1  # in the place of a site
_DEVICES: Final = ("cpu", "cuda")
assert len(GRADIENT) == FLAT_CELLS, "what C++ notes is copied as it is"


class NativeGradients:
    """Watches leaves in C++ and collects the recorded times.

    Args:
        library: The C++ library that watches.
        recorder: Receives the rows.
        ready: Receives the parameters that became ready.
    """

    def __init__(self, library: NativeLibrary, recorder: Recorder, ready: ReadyGradients) -> None:
        self._watch = library.watch_gradient
        self._control = library.gradient_control
        self._rows = library.gradients
        self._room = len(self._rows) // FLAT_CELLS
        self._none = memoryview(array("q", [_NONE]) * self._room)
        self._recorder = recorder
        self._ready = ready
        self._taken = self._control[_WRITTEN]
        self._noted = self._taken
        self._missed = self._control[_MISSED]
        # The parameter ids of each leaf: a leaf may hold several parameters.
        self._watched: WeakIdentityMap[torch.Tensor, list[int]] = WeakIdentityMap()
        self._backward_began = self._step_ended = self._taken
        # Reentrant: a signal handler of the job may train while this code runs. Two locks, so that
        # the job's thread does not wait for all of the writer's work.
        self._collecting = threading.RLock()
        self._noting = threading.RLock()
        self._abandoned = False

    def watch(self, tensor: int, leaf: torch.Tensor, site: int, device_site: int = _NONE) -> bool:
        """Starts to record when the gradient of a leaf becomes ready.

        Args:
            tensor: The leaf's id.
            leaf: A parameter.
            site: The recording site of its gradients.
            device_site: The recording site of the device's work for them; -1 if it is not timed.

        Returns:
            Whether the leaf is watched in C++; if not, it needs a Python hook.
        """
        import torch

        # Subclasses of Tensor call hooks in their own way.
        if type(leaf) not in (torch.nn.Parameter, torch.Tensor) or leaf.device.type not in _DEVICES:
            return False
        if not self._watch(leaf._cdata, site, device_site):
            return False
        self._watched.set(leaf, [*(self._watched.get(leaf) or ()), tensor])
        return True

    def forget(self, leaf: torch.Tensor) -> list[int]:
        """Stops watching a leaf, whose single post-accumulate hook will be replaced.

        Args:
            leaf: Any tensor.

        Returns:
            The ids for which it was watched.
        """
        return self._watched.pop(leaf) or []

    def remember(self, leaf: torch.Tensor, tensors: list[int]) -> None:
        """Resumes watching a leaf that still has its hook.

        Args:
            leaf: The argument of `forget`.
            tensors: The result of `forget`.
        """
        if tensors:
            self._watched.set(leaf, tensors)

    def moved(self) -> list[torch.Tensor]:
        """Leaves that are not on the CPU, for which the device's time is to be recorded as well."""
        return [leaf for leaf in self._watched.live_keys() if leaf.device.type != "cpu"]

    def begin_backward(self, *, paused: bool) -> None:
        """Notes the start of a backward pass, in which nothing is ready yet.

        Args:
            paused: Whether to record nothing in it.
        """
        control = self._control
        if control[_WRITTEN] - self._taken > self._room // 2:
            self.collect()  # the writer does not get to it in time
        with self._noting:
            self._ready.in_backward.clear()
            self._backward_began = control[_WRITTEN]
        control[_PAUSED] = paused
        control[_NEWEST_NS] = 0

    def end_step(self) -> None:
        """Forgets which gradients are ready."""
        with self._noting:
            self._ready.latest.clear()
            self._step_ended = self._control[_WRITTEN]

    @property
    def newest_ns(self) -> int:
        """Time of the newest ready gradient of this backward pass; 0 if there is none."""
        newest_ns: int = self._control[_NEWEST_NS]
        return newest_ns

    @property
    def has_news(self) -> bool:
        """Whether a gradient became ready since the last `collect`."""
        return bool(self._control[_WRITTEN] != self._noted)

    def filled(self) -> float:
        """The used fraction of the ring buffer."""
        return (self._control[_WRITTEN] - self._taken) / self._room

    def collect(self) -> None:
        """Moves gradients that became ready since the last call to the recorder and `ready`."""
        if not self.has_news:
            return  # nothing is new and no other thread is collecting
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
                if self._recorder.detailed:
                    self._recorder.add_rows(taken)
                taken[::FLAT_CELLS] = self._none[: len(sites)]
                self._note(first, sites)
                self._noted = self._taken

    def _note(self, first: int, sites: list[int]) -> None:
        """Adds gradients to `ready`.

        Args:
            first: The running number of the first of them.
            sites: The recording site of each, in order.
        """
        recorder, ready = self._recorder, self._ready
        if recorder.detailed:
            lost = self._control[_MISSED] - self._missed
            self._missed += lost
            recorder.dropped += lost
        known = recorder.sites
        tensors = [known[site][2] for site in sites]
        with self._noting:
            ready.trained.update(tensors)
            ready.latest.extend(tensors[max(0, self._step_ended - first) :])
            ready.in_backward.extend(tensors[max(0, self._backward_began - first) :])

    def pause(self) -> None:
        """Records nothing until the next backward pass begins that is recorded."""
        self._control[_PAUSED] = True

    def abandon(self) -> None:
        """Resets the locks in a forked child: another thread may have held them at the fork."""
        self._abandoned = True
        self._collecting = threading.RLock()
        self._noting = threading.RLock()
        self._control[_PAUSED] = True
