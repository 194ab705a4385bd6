"""Records messages of CUDA graphs: nothing is sent while a graph is captured, but at each replay.

At the capture, a marker shows each message. Each replay records them as messages, at times that are
not known: a graph is launched as one, and no event of the tracer can stand inside it. In the steps
of level ``op``, the profiler's kernels give the times (`operators.py`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddltrace.tracer.fault_barrier import quiet
from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.c10d.groups import Group
    from ddltrace.tracer.interpose.patches import Patches
    from ddltrace.tracer.record.recorder import Message, Recorder

_MOST_REPLAYS: Final = 4096  # kept for the profiler's window
_COPIED: Final = ("name", "tensors", "bytes", "out_bytes", "dtype", "peer", "tag")

_now = time.monotonic_ns


class Captured(NamedTuple):
    """A message in a graph.

    Attributes:
        like: A message with the values that each replay's message has as well.
        group: Its group, which numbers the messages.
    """

    like: Message
    group: Group


class CudaGraphs:
    """The messages in the graphs of a job.

    Args:
        recorder: Receives markers and messages.
        fault: Notes a failure inside the tracer.

    Attributes:
        replays: The messages of the latest replays, in order.
    """

    def __init__(self, recorder: Recorder, fault: Callable[[str, Exception], None]) -> None:
        self._recorder = recorder
        self._fault = fault
        self._captures: list[list[Captured]] = []  # those that are running
        self._of_graph: WeakIdentityMap[Any, list[Captured]] = WeakIdentityMap()
        self.replays: deque[Sequence[Message]] = deque(maxlen=_MOST_REPLAYS)

    def patch(self, graph_class: Any, patches: Patches) -> None:
        """Patches ``torch.cuda.CUDAGraph``.

        Args:
            patches: Replaces what runs in every step.
        """
        for name, then in (
            ("capture_begin", self._begin),
            ("capture_end", self._end),
            ("replay", self._replayed),
            ("reset", lambda graph, _: self._of_graph.pop(graph)),
        ):
            method = self._followed(getattr(graph_class, name), then)
            if name == "replay":
                patches.put(graph_class, name, method)
            else:
                setattr(graph_class, name, method)

    def add(self, like: Message, group: Group) -> None:
        """Records a message that becomes part of a graph.

        Args:
            like: The message, which the recorder does not know.
        """
        site = self._recorder.site(
            "marker",
            f"captured {like.op} {like.name}" if like.name != like.op else f"captured {like.op}",
            -1,
            -1 if like.bytes is None else like.bytes,
            -1 if like.out_bytes is None else like.out_bytes,
        )
        at = like.enqueue_ns
        self._recorder.add(site, at, at, threading.get_ident())
        if len(self._captures) == 1:  # of several at a time, it is not known which one it is in
            self._captures[0].append(Captured(like, group))

    def _begin(self, graph: Any, start: int) -> None:
        del start
        captured: list[Captured] = []
        self._captures.append(captured)
        self._of_graph.set(graph, captured)

    def _end(self, graph: Any, start: int) -> None:
        del start
        captured = self._of_graph.get(graph)
        self._captures = [running for running in self._captures if running is not captured]

    def _replayed(self, graph: Any, start: int) -> None:
        """Records the messages of a replay that was launched at `start`."""
        captured = self._of_graph.get(graph)
        if not captured:
            return
        recorder, messages = self._recorder, []
        for like, group in captured:
            if like.op in P2P_OPS:
                number = group.next_between(like.op, like.peer, like.tag)
            else:
                number = group.next_collective()
            if recorder.paused:
                continue
            message = recorder.new_message(like.op, like.group, start, "graph")
            for name in _COPIED:
                setattr(message, name, getattr(like, name))
            message.seq = number
            message.clock = "graph"
            recorder.release(message)
            messages.append(message)
        self.replays.append(messages)

    def _followed(
        self, original: Callable[..., Any], then: Callable[[Any, int], object]
    ) -> Callable[..., Any]:
        """Calls a function after a method, with the graph and the time before the call."""
        then = quiet(then, self._fault)

        @functools.wraps(original)
        def method(graph: Any, *args: Any, **kwargs: Any) -> Any:
            start = _now()
            result = original(graph, *args, **kwargs)
            then(graph, start)
            return result

        return method


class GraphKernels:
    """Finds the kernels of replayed messages among the profiler's events.

    Args:
        replays: The messages of the replays in the profiler's window, in order.
    """

    def __init__(self, replays: Sequence[Sequence[Message]]) -> None:
        self._replays = replays
        self._launches: list[tuple[int, int]] = []
        self._kernels: dict[int, list[tuple[int, int]]] = {}

    def add_launch(self, start_ns: int, correlation: int) -> None:
        """Adds a launch of a graph by the host."""
        self._launches.append((start_ns, correlation))

    def add_kernel(self, start_ns: int, end_ns: int, correlation: int) -> None:
        """Adds a kernel that communicates."""
        self._kernels.setdefault(correlation, []).append((start_ns, end_ns))

    def timed(self) -> list[Message]:
        """Sets the times of the messages whose kernels are known.

        A graph without messages has no kernels that communicate, so the launches that have some are
        the replays with messages, in order.

        Returns:
            These messages.
        """
        launches = [c for _, c in sorted(self._launches) if self._kernels.get(c)]
        found: list[Message] = []
        if len(launches) != len(self._replays):
            return found
        for correlation, messages in zip(launches, self._replays, strict=True):
            kernels = sorted(self._kernels[correlation])
            if len(kernels) != len(messages):
                continue
            for message, (start, end) in zip(messages, kernels, strict=True):
                message.start_ns, message.end_ns, message.clock = start, end, "kernel"
                found.append(message)
        return found
