"""When gradients became ready, as taken down without Python.

A function of Python for each parameter takes the interpreter between two layers of the backward
pass, with none of its code in a cache: a hundred of them in a step cost more than all layers. So
`native/gradients.cpp` takes down the times, and this brings them where the functions would have
put them: at the latest at the pass's end, or when somebody asks, or when the writer does.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddltrace.tracer.interpose.autograd import Backward
    from ddltrace.tracer.native.library import NativeLibrary
    from ddltrace.tracer.recorder import Recorder
    from ddltrace.tracer.registry import Registry

# Of NativeLibrary.gradient_control.
_WRITTEN: Final = 0
_MISSED: Final = 1
_PAUSED: Final = 2
# Of NativeLibrary.gradients.
_WHAT: Final = 0
_FIRST: Final = 1
_READY_NS: Final = 1
_THREAD: Final = 2


class _Leaf(NamedTuple):
    """A leaf that is watched, and the ids for which it is: one may hold several parameters."""

    reference: weakref.ref[torch.Tensor]
    tensors: list[int]


class NativeGradients:
    """Watches leaves without Python, and collects what was seen of them.

    Args:
        library: What watches.
        recorder: Where the rows go.
        registry: Where the parameters are noted as ready.
        backward: Is told when the newest gradient became ready.
        detailed: Whether there are rows at all.
    """

    def __init__(
        self,
        library: NativeLibrary,
        recorder: Recorder,
        registry: Registry,
        backward: Backward,
        *,
        detailed: bool,
    ) -> None:
        self._watch = library.watch_gradient
        self._control = library.gradient_control
        self._ring = np.asarray(library.gradients).reshape(-1, library.GRADIENT_FIELDS)
        self._recorder = recorder
        self._registry = registry
        self._backward = backward
        self._detailed = detailed
        self._taken = self._control[_WRITTEN]
        self._missed = self._control[_MISSED]
        self._watched: dict[int, _Leaf] = {}
        # Reentrant: a signal handler of the job may train in the middle of our code.
        self._lock = threading.RLock()
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
        if not self._watch(leaf._cdata, _FIRST + site):
            return False
        known = self._watched.get(id(leaf))
        if known is None or known.reference() is not leaf:
            known = self._watched[id(leaf)] = _Leaf(
                weakref.ref(leaf, self._forgetting(id(leaf))), []
            )
        known.tensors.append(tensor)
        return True

    def _forgetting(self, key: int) -> Callable[[weakref.ref[torch.Tensor]], None]:
        """What to do when a leaf is gone: its identity can be given to another."""

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            known = self._watched.get(key)
            if known is not None and known.reference is gone:
                del self._watched[key]

        return forget

    def forget(self, leaf: torch.Tensor) -> list[int]:
        """Lets go of a leaf, whose one hook is to be another.

        Args:
            leaf: Any tensor.

        Returns:
            The ids that it was watched for.
        """
        known = self._watched.get(id(leaf))
        if known is None or known.reference() is not leaf:
            return []
        del self._watched[id(leaf)]
        return known.tensors

    def moved(self) -> list[torch.Tensor]:
        """Leaves that have left the CPU since: of them, the device's time is told, too."""
        leaves = [known.reference() for known in list(self._watched.values())]
        return [leaf for leaf in leaves if leaf is not None and leaf.device.type != "cpu"]

    def pause(self, paused: bool) -> None:
        """Takes down nothing, or again what becomes ready."""
        self._control[_PAUSED] = paused

    def collect(self) -> None:
        """Brings what became ready since the last call to the recorder and the registry."""
        with self._lock:
            written = self._control[_WRITTEN]
            if written == self._taken or self._abandoned:
                return
            places = np.arange(self._taken, written) % len(self._ring)
            what = self._ring[places, _WHAT]
            # One that another thread is still writing ends what can be read.
            unwritten = np.flatnonzero(what == 0)
            if len(unwritten):
                places, what = places[: unwritten[0]], what[: unwritten[0]]
            sites = (what - _FIRST).tolist()
            ready_ns, threads = self._ring[places, _READY_NS], self._ring[places, _THREAD]
            self._ring[places, _WHAT] = 0
            self._taken += len(places)
            if sites:
                self._bring(sites, ready_ns.tolist(), threads.tolist())

    def _bring(self, sites: list[int], ready_ns: list[int], threads: list[int]) -> None:
        recorder = self._recorder
        if self._detailed:
            lost = self._control[_MISSED] - self._missed
            self._missed += lost
            room = max(0, 1 + (recorder.limit - len(recorder.flat)) // 4)
            lost += len(sites[room:])
            rows = zip(sites[:room], ready_ns, ready_ns, threads, strict=False)
            recorder.emit([value for row in rows for value in row])
            recorder.dropped += lost
        self._backward.last_gradient_ns = ready_ns[-1]
        self._registry.note_ready([recorder.sites[site][2] for site in sites])

    def abandon(self) -> None:
        """In a forked child: another thread may have been at it when the fork came."""
        self._abandoned = True
        self._lock = threading.RLock()
        self.pause(True)
