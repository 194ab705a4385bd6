"""One server: applies what workers push and answers what they read, as its rule decides.

It is a process of its own, which `server_group.py` starts. It ends when all workers have finished
or died; until all of them are connected, it ends with the process that started it, too.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.asynchrony.server_optimizer import ServerOptimizer
from ddltrace.experiments.asynchrony.wire_format import (
    BODY_TAG,
    FINISH,
    FIRST,
    HEADER_TAG,
    REPLY_TAG,
    STATE,
    STATE_TAG,
    Header,
    Key,
    Reply,
    read_body,
    read_settings,
    read_states,
    read_values,
    write_reply,
    write_states,
)
from ddltrace.experiments.codecs.codec import Codec
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.collectives.server import join
from ddltrace.experiments.messages.trace_marks import carrying, mark
from ddltrace.experiments.parent_process import outlive_parent
from ddltrace.experiments.strategy.plugins import load_inherited
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.synchronization.marks import mark_name
from ddltrace.experiments.synchronization.rule import ServerRule
from ddltrace.experiments.synchronization.server_state import Answer, Apply, Decision, ServerState
from ddltrace.tracer.errors import MissingCapabilityError


@dataclass
class _Worker:
    """The server's state of one worker.

    Attributes:
        gone: Whether it has finished or died.
        died: Whether it has died.
        filled: Whether it has brought the first parameters, and so knows the keys.
        final: Whether it waits for the parameters at the end of the training.
        asked_ns: Time of the request that it waits for.
        sent: The last answer, until the worker has taken it.
        pushed: Its gradients that are not yet applied, by clock.
    """

    gone: bool = False
    died: bool = False
    filled: bool = False
    final: bool = False
    asked_ns: int = 0
    sent: tuple[dist.Work | None, torch.Tensor] | None = None
    pushed: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class UpdateServer:
    """Serves all workers, each on a thread of its own; one lock makes updates and reads atomic."""

    def __init__(
        self,
        rule: ServerRule,
        codec: Codec | None,
        group: dist.ProcessGroup,
        names: Sequence[int],
    ) -> None:
        """Makes a server without parameters: the first push of any worker brings them.

        Args:
            rule: The synchronization rule.
            codec: Decodes gradients; None if they are not encoded.
            group: The group of all workers, followed by all servers.
            names: Global ranks of the workers.
        """
        self._rule = rule
        self._codec = codec
        self._group = group
        self._names = list(names)
        self._workers = [_Worker() for _ in names]
        self._state = ServerState(rule, len(names))
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._keys: list[Key] = []
        self._values: list[torch.Tensor] = []
        self._optimizer: ServerOptimizer | None = None
        self._updates = 0

    def run(self) -> None:
        """Serves until no worker trains any more and all requests are answered."""
        for worker in range(len(self._workers)):
            threading.Thread(
                target=self._serve, args=(worker,), name=f"worker-{worker}", daemon=True
            ).start()
        self._over.wait()
        for each in self._workers:
            if each.sent is not None and not each.died:
                _wait(each.sent[0])

    def line_ended(self, worker: int, said_goodbye: bool) -> None:
        """To be called when a worker's lifeline has ended."""
        with self._lock:
            own = self._workers[worker]
            own.died = own.died or not said_goodbye
            if not own.gone:
                self._leave(worker, "died")
            self._conclude()

    def _serve(self, worker: int) -> None:
        try:
            while True:
                header = Header.read(self._receive(worker, Header.empty(), HEADER_TAG, "header"))
                own = self._workers[worker]
                if own.sent is not None:  # the worker has received its answer, or it would not send
                    _wait(own.sent[0])
                    own.sent = None
                if header.kind == FINISH:
                    with self._lock:
                        own.final = True
                        own.asked_ns = time.monotonic_ns()
                        self._leave(worker, "finished")
                        self._conclude()
                    return
                if header.kind == STATE:
                    self._send_state(worker)
                    continue
                body = torch.empty(header.body_bytes, dtype=torch.uint8)
                if header.kind == FIRST:
                    self._receive(worker, body, BODY_TAG, "first parameters")
                    self._fill(body, header.settings_bytes)
                    own.filled = True
                else:
                    self._receive(worker, body, BODY_TAG, f"push {header.clock}")
                    self._take(worker, header, body)
        except RuntimeError:
            return  # the worker has died; its lifeline reports that, too

    def _take(self, worker: int, header: Header, body: torch.Tensor) -> None:
        """Handles a push."""
        settings, gradients = read_body(body, header.settings_bytes, self._keys, self._codec)
        with self._lock:
            if settings is not None and self._optimizer is not None:
                self._optimizer.set(settings)
            own = self._workers[worker]
            own.pushed[header.clock] = gradients
            own.asked_ns = time.monotonic_ns()
            self._carry_out(self._state.push(worker, header.clock, header.computed_ns / 1e9))
            self._carry_out(self._state.read(worker, header.clock + 1))

    def _fill(self, body: torch.Tensor, settings_bytes: int) -> None:
        """Stores the parameters of the first worker; those of all workers are equal."""
        with self._lock:
            if self._values:
                return
            settings = read_settings(body, settings_bytes)
            self._keys = [Key(*values) for values in settings["keys"]]
            self._values = [
                value.clone() for value in read_values(body[settings_bytes:], self._keys)
            ]
            self._optimizer = ServerOptimizer(
                settings["name"],
                settings["optimizer"],
                self._values,
                [key.group for key in self._keys],
                rate_factor=1.0 if self._rule.by_rounds else 1.0 / len(self._workers),
            )
            states = read_states(body[body.numel() - settings["state_bytes"] :])
            if states:
                self._optimizer.load(states)

    def _send_state(self, worker: int) -> None:
        """Sends the state of the optimizer, for a checkpoint."""
        with self._lock:
            assert self._optimizer is not None  # a worker brings parameters before it asks
            data = write_states(self._optimizer.state())
        works = []
        for tensor in (torch.tensor([data.numel()]), data):
            if tensor.numel():
                with carrying("state of the optimizer", ()):
                    works.append(
                        dist.isend(tensor, group=self._group, group_dst=worker, tag=STATE_TAG)
                    )
        for work in works:
            _wait(work)

    def _leave(self, worker: int, how: str) -> None:
        self._workers[worker].gone = True
        self._mark("leave", worker, self._clock_of(worker), how=how)
        self._carry_out(self._state.leave(worker))

    def _clock_of(self, worker: int) -> int:
        return self._state.clock(worker)

    def _conclude(self) -> None:
        """Answers the workers that have finished once no worker trains any more."""
        if self._state.active:
            return
        for worker, own in enumerate(self._workers):
            if own.final and not own.died:
                own.final = False
                clock = self._clock_of(worker)
                self._send(worker, Reply(clock, clock, 0, own.filled))
        self._over.set()

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Apply):
                self._apply(decision)
            elif isinstance(decision, Answer):
                self._answer(decision)
            else:
                self._workers[decision.worker].pushed.pop(decision.clock, None)
                self._mark("drop", decision.worker, decision.clock)

    def _apply(self, decision: Apply) -> None:
        pushes = []
        for worker, clock in decision.pushes:
            pushes.append(self._workers[worker].pushed.pop(clock))
            self._mark("apply", worker, clock, update=self._updates)
        assert self._optimizer is not None
        self._updates += 1
        self._optimizer.update([_mean(each) for each in zip(*pushes, strict=True)])

    def _answer(self, decision: Answer) -> None:
        own = self._workers[decision.worker]
        now = time.monotonic_ns()
        self._mark(
            "read",
            decision.worker,
            decision.clock,
            start_ns=own.asked_ns,
            held=decision.held,
            bound=decision.bound,
            active=[self._names[number] for number in decision.active],
        )
        slowest = min((decision.held[number] for number in decision.active), default=0)
        self._send(decision.worker, Reply(decision.clock, slowest, now - own.asked_ns, True))

    def _send(self, worker: int, reply: Reply) -> None:
        data = write_reply(reply, self._values if reply.filled else ())
        with carrying(f"parameters for step {reply.clock}", ()):
            try:
                work = dist.isend(data, group=self._group, group_dst=worker, tag=REPLY_TAG)
            except RuntimeError:
                return  # the worker has died; its lifeline reports that, too
        self._workers[worker].sent = (work, data)

    def _receive(self, worker: int, tensor: torch.Tensor, tag: int, name: str) -> torch.Tensor:
        with carrying(name, ()):
            work = dist.irecv(tensor, group=self._group, group_src=worker, tag=tag)
        assert work is not None
        work.wait()
        return tensor

    def _mark(
        self, what: str, worker: int, clock: int, *, start_ns: int | None = None, **values: Any
    ) -> None:
        mark(mark_name(what, worker=self._names[worker], clock=clock, **values), start_ns)


def _mean(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean of the gradients of one key; a missing gradient counts as zero."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if len(gradients) == 1:
        return present[0]
    return torch.stack(present).sum(0) / len(gradients)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        try:
            work.wait()
        except RuntimeError:
            return  # the worker has died; its lifeline reports that, too


_DRAIN_SECONDS: Final = 10.0


def main() -> None:
    """Serves until the end."""
    # The first to be registered runs last: threads that wait for dead workers cannot end.
    atexit.register(os._exit, 0)
    load_inherited()
    ended = _Ended()
    joined = join(ended)
    outlive_parent()  # all workers are connected, so lifelines replace the parent
    strategy = parse(joined.options["spec"])
    workers = joined.options["global_ranks"][: joined.workers]
    assert isinstance(strategy.synchronization, ServerRule)
    description = compose(strategy.codec, strategy.feedback)
    server = UpdateServer(
        strategy.synchronization,
        None if description is None else description.codec(None),
        joined.group,
        workers,
    )
    servers = joined.options["servers"]
    mark(mark_name("rule", spec=strategy.spec, workers=workers, servers=servers))
    ended.set_server(server, len(workers))
    server.run()
    # The last messages are in flight until the workers have closed their lines.
    ended.all.wait(_DRAIN_SECONDS)
    joined.lines.close()


class _Ended:
    """Stores which lifelines have ended until a server can receive the information."""

    def __init__(self) -> None:
        self.all = threading.Event()
        self._left = 0
        self._lock = threading.Lock()
        self._kept: list[tuple[int, bool]] = []
        self._server: UpdateServer | None = None

    def __call__(self, worker: int, said_goodbye: bool) -> None:
        with self._lock:
            if self._server is None:
                self._kept.append((worker, said_goodbye))
                return
            self._end(self._server, worker, said_goodbye)

    def set_server(self, server: UpdateServer, workers: int) -> None:
        with self._lock:
            self._server = server
            self._left = workers
            for worker, said_goodbye in self._kept:
                self._end(server, worker, said_goodbye)

    def _end(self, server: UpdateServer, worker: int, said_goodbye: bool) -> None:
        server.line_ended(worker, said_goodbye)
        self._left -= 1
        if not self._left:
            self.all.set()


if __name__ == "__main__":
    with suppress(MissingCapabilityError):  # the workers say it
        main()
