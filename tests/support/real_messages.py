"""A rank whose messages the compiled library records, with a peer that completes them on command.

Both sides of each process group live in this process. The rank's side launches through PyTorch's
dispatcher, where the library's kernels are; the peer's side is called directly. A message is under
way until the peer takes part in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey, _dispatch_keyset_full_after

from ddltrace.tracer.interpose.c10d.gloo_times import GlooTimes
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.interpose.c10d.known_messages import KnownMessages, Like
from ddltrace.tracer.native.layout import CONTROL, MESSAGE, OFFER, SLOT
from ddltrace.tracer.native.library import NativeLibrary
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Launched, Message, Recorder

PATIENCE_S = 60
ELEMENTS = 100
OPEN = 0
FREE = 0

_numbers = itertools.count()


class Library:
    """The compiled library in this process, with Python kernels above which its own stand.

    Args:
        native: The loaded library.
    """

    def __init__(self, native: NativeLibrary) -> None:
        self.native = native
        self.size = len(native.ring) // len(MESSAGE)
        self.on_python: Callable[[], object] | None = None
        """Called when a launch of this process reaches the kernel in Python."""
        self._kernels = torch.library.Library("c10d", "IMPL")
        below = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
        for name in ("allreduce_", "broadcast_", "reduce_", "send", "recv_"):
            redispatch = getattr(torch.ops.c10d, name).default.redispatch

            def kernel(keys: Any, *args: Any, call: Any = redispatch, **kwargs: Any) -> Any:
                if self.on_python is not None:
                    self.on_python()
                return call(keys & below, *args, **kwargs)

            self._kernels.impl(name, kernel, "BackendSelect", with_keyset=True)
        assert native.see_launches()
        native.see_launches = lambda: 1  # once in a process

    def close(self) -> None:
        """Removes the kernels in Python; those in C++ pass everything on."""
        self._kernels._destroy()

    def what(self, place: int) -> int:
        """The state of a place of the ring."""
        return self.native.ring[place * len(MESSAGE) + MESSAGE["what"]]

    def state(self, slot: int) -> int:
        """The state of the message in a slot."""
        return self.native.slots[slot * len(SLOT) + SLOT["state"]]

    @property
    def launched(self) -> int:
        """The number of messages that were launched through the ring."""
        return self.native.control[CONTROL["launched"]]


class Pair:
    """A process group of this rank and a peer, or of this rank alone.

    Args:
        alone: Whether there is no peer. Then a message needs no network and ends by itself.
    """

    def __init__(self, *, alone: bool = False) -> None:
        size = 1 if alone else 2
        store = dist.PrefixStore(f"pair {next(_numbers)}", dist.HashStore())
        sides: list[Any] = [None, None]

        def join(rank: int) -> None:
            sides[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=PATIENCE_S))

        if alone:
            join(0)
        else:
            other = threading.Thread(target=join, args=(1,))
            other.start()
            join(0)
            other.join()
        self.own = dist.ProcessGroup(store, 0, size)
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self.own._register_backend(cpu, gloo, sides[0])
        self.peer: Any = sides[1]
        # Never destroyed: with PyTorch 2.6, that can hang while threads of Gloo end.
        for side in (self.own, sides[0]):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(side))


class Ended:
    """The handle of the peer's side where there is no peer."""

    def wait(self) -> None:
        """Returns at once."""


class Flight:
    """A message that was launched: its place in the ring, and how the peer takes part in it.

    Attributes:
        place: Its place in the ring.
        enqueue_ns: When it was launched.
        work: Its handle.
        take_part: Launches the peer's side; returns its handle.
    """

    def __init__(
        self, library: Library, place: int, work: Any, take_part: Callable[[], Any]
    ) -> None:
        self.place = place
        self.enqueue_ns = library.native.ring[place * len(MESSAGE) + MESSAGE["enqueue_ns"]]
        self.work = work
        self._library = library
        self.take_part = take_part

    def end(self) -> None:
        """The peer takes part; returns when Gloo's thread has recorded the end."""
        self.take_part().wait()
        self.until_ended()

    def complete(self) -> None:
        """The peer takes part, and the handle is waited for."""
        other = self.take_part()
        self.work.wait()
        other.wait()

    def until_ended(self) -> None:
        """Waits until the library knows that the message has ended."""
        with contextlib.suppress(RuntimeError):  # it may have failed
            self.work.wait()
        deadline = time.monotonic() + PATIENCE_S
        while self._library.state(self.place) == OPEN:
            assert time.monotonic() < deadline, "no end was reported"
            time.sleep(0)


class Rank:
    """A rank with one known bucket and one known broadcast in each of its groups.

    Args:
        library: The compiled library.
        pairs: Number of process groups with a peer, whose messages do not wait for each other.
        alone: Whether to add a process group without a peer, the last one.
    """

    def __init__(self, library: Library, pairs: int = 1, *, alone: bool = False) -> None:
        self.library = library
        self.recorder = Recorder(1 << 20)
        times = GlooTimes(library.native, self.recorder)
        times.listens = True
        library.native.forget()
        self.known = KnownMessages(library.native, times, self.recorder)
        self.known.see_launches()
        self.group = Group(name="0", ranks=(5, 6), own=0)
        self.pairs = [Pair() for _ in range(pairs)] + [Pair(alone=True)] * alone
        self.buckets = [torch.ones(ELEMENTS) for _ in self.pairs]
        self._broadcast_options = dist.BroadcastOptions()
        self._broadcast_options.rootRank = 0 if alone else 1
        self._introduce()

    def _introduce(self) -> None:
        """Launches every message once, so that the library knows it."""
        places, ops = [], []

        def make_known() -> None:
            op = ops[-1]
            message = Message(0, op, "0", 0, "dispatcher")
            message.name, message.tensors, message.dtype = f"a {op}", [7, 8], "float32"
            place = self.known.add(message, self.group)
            assert place is not None
            places.append(place)

        self.library.on_python = make_known
        known = self.known
        ways = (
            ("all_reduce", known.begin_backward, known.end_backward, self._all_reduce),
            ("broadcast", known.begin_broadcasts, known.end_broadcasts, self._broadcast),
        )
        try:
            for number, (op, begin, end, launch) in itertools.product(range(len(self.pairs)), ways):
                ops.append(op)
                begin()
                work, take_part = launch(number)
                end(time.monotonic_ns())
                take_part().wait()
                work.wait()
        finally:
            self.library.on_python = None
        self.known.activate(places)

    def _all_reduce(self, number: int) -> tuple[Any, Callable[[], Any]]:
        pair = self.pairs[number]
        work = pair.own.allreduce([self.buckets[number]])
        if pair.peer is None:
            return work, Ended
        return work, lambda: pair.peer.allreduce([torch.ones(ELEMENTS)])

    def _broadcast(self, number: int) -> tuple[Any, Callable[[], Any]]:
        pair, options = self.pairs[number], self._broadcast_options
        work = pair.own.broadcast([torch.ones(ELEMENTS)], options)
        if pair.peer is None:
            return work, Ended
        return work, lambda: pair.peer.broadcast([torch.ones(ELEMENTS)], options)

    def launch(self, op: str = "all_reduce", group: int = 0) -> Flight | None:
        """Launches a known message; None if the library had no room for it.

        The caller has begun a backward pass, or broadcasts. A message without room is completed.
        """
        before = self.library.launched
        work, take_part = (self._all_reduce if op == "all_reduce" else self._broadcast)(group)
        if self.library.launched == before:
            take_part().wait()
            work.wait()
            return None
        place = (self.library.launched - 1) % self.library.size
        return Flight(self.library, place, work, take_part)

    def all_reduce(self, group: int = 0) -> Flight:
        """Begins a backward pass and launches its message."""
        self.known.begin_backward()
        flight = self.launch(group=group)
        assert flight is not None, "no room"
        return flight

    def launch_for_python(
        self,
        launch: Callable[[Pair], Any],
        take_part: Callable[[Any], Any],
        *,
        waited_once: bool = False,
        group: int = 0,
    ) -> Flight:
        """Offers a launch to the library; Python is to describe the message with `say`."""
        pair, offer = self.pairs[group], self.library.native.offered()
        offer[OFFER["waited_once"]] = waited_once
        offer[OFFER["state"]] = NativeLibrary.OFFERED
        work = launch(pair)
        assert offer[OFFER["state"]] < NativeLibrary.UNRECORDED, "the library has refused it"
        return Flight(self.library, offer[OFFER["place"]], work, lambda: take_part(pair.peer))

    def reduce(self, group: int = 0) -> Flight:
        """A reduction to this rank that Python is to describe."""
        return self.launch_for_python(
            lambda pair: pair.own.reduce([torch.ones(ELEMENTS)], dist.ReduceOptions()),
            lambda peer: peer.reduce([torch.ones(ELEMENTS)], dist.ReduceOptions()),
            group=group,
        )

    def send(self, tag: int = 5) -> Flight:
        """A send that ends when it is waited for, and that Python is to describe."""
        return self.launch_for_python(
            lambda pair: pair.own.send([torch.ones(ELEMENTS)], 1, tag),
            lambda peer: peer.recv([torch.ones(ELEMENTS)], 0, tag),
            waited_once=True,
        )

    def receive(self, tag: int = 5) -> Flight:
        """A receive that ends when it is waited for, and that Python is to describe."""
        return self.launch_for_python(
            lambda pair: pair.own.recv([torch.empty(ELEMENTS)], 1, tag),
            lambda peer: peer.send([torch.ones(ELEMENTS)], 0, tag),
            waited_once=True,
        )

    def say(
        self,
        flight: Flight,
        like: Like,
        *,
        seq: int | None = 0,
        peer: int | None = None,
        waited_once: bool = False,
    ) -> Launched | None:
        """Describes a message that was launched for Python."""
        return self.known.launched(
            flight.place,
            flight.enqueue_ns,
            like,
            self.group,
            seq=seq,
            peer=peer,
            waited_once=waited_once,
        )

    def rows(self) -> list[dict[str, Any]]:
        """What the writer would write now."""
        self.known.collect()
        recorder = self.recorder
        batch = BatchBuilder(recorder.sites, recorder.patterns).build(recorder.take())
        return [] if batch is None else batch.to_pylist()
