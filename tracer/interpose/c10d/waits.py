"""Records waits of the host: ``Work.wait``, ``Work.is_completed`` and futures.

A wait finds its message through the object that is waited on. Objects are looked up by identity
and referenced weakly, so that tracing does not extend the lifetime of the job's objects. Only the
newest objects of each thread are held until their callers have received them: if no reference
were left, PyTorch would create another Python object for the same `Work`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from ddltrace.tracer.naming.weak_identity import WeakIdentityMap
from ddltrace.tracer.record.recorder import Launched, Message

if TYPE_CHECKING:
    from ddltrace.tracer.interpose.patch_context import PatchContext

_now = time.monotonic_ns
_PATIENCE_NS: Final = 50_000_000
# A dispatch mode or a signal handler of the job may launch before an outer launch has returned.
_MOST_NESTED: Final = 4


class MessageOf:
    """Maps objects of the job to their messages, while the objects exist.

    Attributes:
        add: Remembers an object for as long as the job keeps it.
    """

    def __init__(self) -> None:
        self._weak: WeakIdentityMap[Any, Message | Launched] = WeakIdentityMap()
        self.add = self._weak.set
        # The newest of each thread, and the objects themselves.
        self._strong: dict[int, tuple[Any, Message]] = {}
        self._newest: dict[int, deque[tuple[int, Message]]] = {}  # ids of the objects, by thread

    def add_newest(self, thing: Any, message: Message) -> None:
        """Adds an object that is about to be returned to the caller."""
        thread = threading.get_ident()
        newest = self._newest.get(thread)
        if newest is None:
            newest = self._newest[thread] = deque()
        if len(newest) >= _MOST_NESTED:
            key, of_former = newest.popleft()
            held = self._strong.get(key)
            if held is not None and held[1] is of_former:  # the id may be reused
                self._weaken(key)
        newest.append((id(thing), message))
        self._strong[id(thing)] = (thing, message)

    def get(self, thing: Any) -> Message | Launched | None:
        """Returns the message of an object, or None."""
        held = self._strong.get(id(thing))
        return self._weak.get(thing) if held is None else held[1]

    def release(self, thing: Any) -> None:
        """Releases an object, if it is held."""
        self._weaken(id(thing))

    def discard(self, thing: Any) -> None:
        """Forgets an object that is no longer needed."""
        if self._strong.pop(id(thing), None) is None:
            self._weak.pop(thing)

    def release_served(self) -> None:
        """No longer holds objects whose messages are complete, and were before they were taken.

        A message can be complete before its launch has returned to the job.
        """
        for key, (_, message) in list(self._strong.items()):
            if message.end_ns is not None and message.end_ns < _now() - _PATIENCE_NS:
                self._weaken(key)

    def _weaken(self, key: int) -> None:
        held = self._strong.get(key)
        if held is not None:
            self.add(*held)
            self._strong.pop(key, None)


class Waits:
    """Records when the host is blocked, and the completions that follow from it.

    Args:
        context: The parts of the recording rank.
        on_received: Called with the message and the `Work` of a completed receive.
        on_ordered: Called with a message that a stream of the job waits for, not the host.
    """

    def __init__(
        self,
        context: PatchContext,
        on_received: Callable[[Message, Any], None],
        on_ordered: Callable[[Message], None],
    ) -> None:
        import torch
        from torch._C._distributed_c10d import Work

        self._context = context
        self._recorder = context.recorder
        self._on_received = on_received
        self._on_ordered = on_ordered
        self.works = MessageOf()
        self.futures = MessageOf()
        # When a polling job observed that a message is complete: the reaper may observe it later,
        # because it waits for the job to release the interpreter lock.
        self.seen_complete: dict[int, int] = {}
        # Messages of backends whose wait does not block: it only orders streams.
        self.stream_ordered: set[int] = set()
        self._module_of_pytorch = Work.__module__
        self.original_wait = Work.wait
        self.original_is_completed = Work.is_completed
        work_class: Any = Work
        future_class: Any = torch._C.Future
        bindings: Any = torch._C
        for owner, name, patched in (
            (work_class, "wait", self._patched_wait),
            (work_class, "is_completed", self._patched_is_completed),
            (work_class, "get_future", self._patched_get_future),
            (future_class, "wait", self._patched_future_wait),
            (future_class, "then", self._patched_then),
            (bindings, "_collect_all", self._patched_collect_all),
        ):
            context.patches.put(owner, name, patched(getattr(owner, name)))

    def patch_work(self, work_class: Any) -> None:
        """Records the waits of a handle class that the job defined in Python.

        Args:
            work_class: A subclass of `Work`, with methods of its own.
        """
        patches = {
            "wait": self._patched_wait,
            "is_completed": self._patched_is_completed,
            "get_future": self._patched_get_future,
        }
        for name, patched in patches.items():
            original = vars(work_class).get(name)
            if isinstance(original, FunctionType):
                replacement = functools.wraps(original)(patched(original))
                self._context.patches.put(work_class, name, replacement)

    def is_in_python(self, work: Any) -> bool:
        """Whether the job wrote the class of a handle in Python: the tracer must not call it."""
        return type(work).__module__ != self._module_of_pytorch

    def record(self, message: Message | Launched | None, name: str, start: int, end: int) -> None:
        """Records that the host was blocked.

        Args:
            message: The message that it waited for; None if unknown.
            name: Name shown in the timeline.
            start: When the wait began.
            end: When it ended.
        """
        self._recorder.add_wait(start, end, -1 if message is None else message.id, name)

    def waited(
        self, message: Message | Launched, start: int, end: int, *, failed: bool = False
    ) -> None:
        """Records that the host has waited until a message was complete."""
        if isinstance(message, Launched):
            # Otherwise Gloo's threads record the end.
            if message.place >= 0 and self._context.known is not None:
                self._context.known.waited(message, end, failed=failed)
        elif message.id in self.stream_ordered:
            self.stream_ordered.discard(message.id)
            self._on_ordered(message)
        else:
            self._recorder.complete(message, end, "wait", "failed" if failed else "ok")
        self._recorder.add_wait(start, end, message.id, message.name)

    def _patched_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        message_of, fault = self.works.get, self._context.fault

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            message = None
            try:
                message = message_of(work)
            except Exception as error:  # noqa: BLE001 - the job continues
                fault("wait", error)
            if message is None:
                return original(work, *args, **kwargs)
            start = _now()
            failed = True
            try:
                result = original(work, *args, **kwargs)
                failed = False
                return result
            finally:
                try:
                    self._waited(message, work, start, _now(), failed=failed)
                except Exception as error:  # noqa: BLE001 - the job continues
                    fault("wait", error)

        return _like(wait, original)

    def _waited(
        self, message: Message | Launched, work: Any, start: int, end: int, *, failed: bool
    ) -> None:
        if failed and not self.is_in_python(work) and not self.original_is_completed(work):
            # The wait timed out; the message may still complete.
            self.record(message, message.name, start, end)
            return
        self.works.discard(work)
        if isinstance(message, Message) and message.op == "recv" and not failed:
            self._on_received(message, work)
        self.waited(message, start, end, failed=failed)

    def _patched_is_completed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def is_completed(work: Any) -> Any:
            completed = original(work)
            if completed:
                try:
                    self._seen_completed(work)
                except Exception as error:  # noqa: BLE001 - the job continues
                    self._context.fault("is_completed", error)
            return completed

        return _like(is_completed, original)

    def _seen_completed(self, work: Any) -> None:
        message = self.works.get(work)
        if not isinstance(message, Message) or message.end_ns is not None:
            return  # or Gloo's threads record the end
        if message.slot >= 0 or self.is_in_python(work):
            self._recorder.complete(message, _now(), "wait")
        else:
            self.seen_complete.setdefault(message.id, _now())

    def _patched_get_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            future = original(work)
            try:
                message = self.works.get(work)
                if message is not None:
                    self.futures.add(future, message)
                    if isinstance(message, Message) and self.is_in_python(work):
                        self._complete_with(message, future)
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("get_future", error)
            return future

        return _like(get_future, original)

    def _complete_with(self, message: Message, future: Any) -> None:
        """Completes a message with its future, if its end is not recorded otherwise."""

        def complete(_: Any) -> None:
            try:
                self._recorder.complete(message, _now(), "host")
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("future of a group in Python", error)

        future.add_done_callback(complete)

    def _patched_future_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        message_of, fault = self.futures.get, self._context.fault

        def wait(future: Any, *args: Any, **kwargs: Any) -> Any:
            message = None
            try:
                message = message_of(future)
            except Exception as error:  # noqa: BLE001 - the job continues
                fault("future wait", error)
            if message is None:
                return original(future, *args, **kwargs)
            start = _now()
            try:
                return original(future, *args, **kwargs)
            finally:
                try:
                    self.record(message, message.name, start, _now())
                except Exception as error:  # noqa: BLE001 - the job continues
                    fault("future wait", error)

        return _like(wait, original)

    def _patched_then(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def then(future: Any, callback: Callable[..., Any]) -> Any:
            try:
                carried = self._context.registry.carried.now
                if carried is not None:
                    callback = self._carrying(*carried, callback)
            except Exception as error:  # noqa: BLE001 - the job continues
                self._context.fault("then", error)
            result = original(future, callback)
            self._follows(result, [future])
            return result

        return _like(then, original)

    def _carrying(
        self, name: str | None, tensors: list[int] | None, callback: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns a callback whose messages are attributed like those of its registering caller."""
        context = self._context

        @functools.wraps(callback)
        def carrying(future: Any) -> Any:
            with context.carrying(name, [None] if tensors is None else tensors):
                return callback(future)

        return carrying

    def _patched_collect_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _collect_all(futures: Any) -> Any:
            result = original(futures)
            self._follows(result, futures)
            return result

        return _like(_collect_all, original)

    def _follows(self, future: Any, former: Iterable[Any]) -> None:
        """Maps a future that completes after others to the last of their messages."""
        try:
            messages = [m for f in former if (m := self.futures.get(f)) is not None]
            if messages:
                self.futures.add(future, max(messages, key=lambda m: m.id))
        except Exception as error:  # noqa: BLE001 - the job continues
            self._context.fault("future", error)


def _like(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    wrapper.__doc__ = original.__doc__
    wrapper.__name__ = original.__name__
    return wrapper
