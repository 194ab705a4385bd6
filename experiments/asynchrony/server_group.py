"""A worker's side of the servers: starts and joins them, pushes and reads, leaves.

Workers and servers meet at the job's own store. Once they are connected, they need it no more, so
that the death of the worker that keeps it does not end the training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ddltrace.experiments.architectures.placement import place
from ddltrace.experiments.asynchrony.wire_format import (
    BODY_TAG,
    FINISH,
    FIRST,
    HEADER_TAG,
    PUSH,
    REPLY_TAG,
    STATE,
    STATE_TAG,
    Header,
    Key,
    KeyState,
    Reply,
    read_reply,
    read_states,
    reply_bytes,
    write_body,
    write_states,
)
from ddltrace.experiments.codecs.codec import Codec, Payload, as_bytes
from ddltrace.experiments.collectives.server_processes import Servers
from ddltrace.experiments.messages.trace_marks import Coding, carrying

_OF_ALL: Final = frozenset({"step", "mu_product", "eta", "ax"})
"""State of optimizers that is one number for a whole tensor."""
_LONGEST_WAIT: Final = timedelta(days=30)
"""A worker may wait for a straggler for as long as it takes; lifelines report dead workers."""
_PATIENCE_SECONDS: Final = 4.0
"""What the training thread gets to notice a dead server, before the process is ended."""


class ServerDiedError(SystemExit):
    """A server has died, which ends the training; the line that says so has been printed."""

    def __init__(self) -> None:
        super().__init__(1)


@dataclass(frozen=True)
class Answered:
    """The answer with which a worker continues.

    Attributes:
        clock: The step that it begins.
        values: Each parameter, flat, by its index.
        filled: Whether the servers have parameters.
    """

    clock: int
    values: dict[int, torch.Tensor]
    filled: bool


class ServerGroup(Servers):
    """The servers' processes and the group of workers and servers.

    Attributes:
        placement: Which server keeps which part of which parameter.
    """

    def __init__(
        self,
        workers: dist.ProcessGroup,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        servers: int,
        spec: str,
        backend: str,
        codec: Codec | None,
    ) -> None:
        """Starts the servers and joins them. Collective.

        Args:
            workers: The ranks that have gradients.
            parameters: The parameters with their names, the same on all ranks.
            servers: Number of servers to start.
            spec: The strategy, from which servers take rule and codec.
            backend: Backend that carries the messages.
            codec: Encodes gradients; None sends them as they are.

        Raises:
            RuntimeError: A server does not start.
        """
        self._died: list[int] = []
        super().__init__(
            workers,
            servers,
            program="ddltrace.experiments.asynchrony.server",
            options={"spec": spec},
            backend=backend,
            timeout=_LONGEST_WAIT,
            outlive_starter=True,
        )
        # From now on, the training survives the death of a worker.
        dist.barrier(workers)
        self._codec = codec
        self._parameters = [parameter for _, parameter in parameters]
        self.placement = place(
            {index: p.numel() for index, p in enumerate(self._parameters)}, servers
        )
        self._keys: list[list[Key]] = [[] for _ in range(servers)]

    def fill(
        self,
        name: str,
        settings: Any,
        groups: Mapping[int, int],
        states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Sends the initial parameters and the optimizer's settings and state to the servers.

        Args:
            name: Name of the optimizer's class in `torch.optim`.
            settings: Settings of its parameter groups.
            groups: For each parameter's index, the number of its parameter group.
            states: For each parameter's index, the state of a checkpoint that the job's optimizer
                has loaded; empty without one.
        """
        for key in self.placement.keys:
            dtype = str(self._parameters[key.tensor].dtype).removeprefix("torch.")
            group = groups.get(key.tensor, -1)
            self._keys[key.server].append(Key(key.tensor, key.start, key.stop, dtype, group))
        works = []
        for server, keys in enumerate(self._keys):
            state = write_states([self._cut(states.get(k.parameter, {}), k) for k in keys])
            answer = {
                "name": name,
                "state_bytes": state.numel(),
                "optimizer": settings,
                "keys": [[k.parameter, k.start, k.stop, k.dtype, k.group] for k in keys],
            }
            text = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
            values = [as_bytes(self._part(self._parameters[key.parameter], key)) for key in keys]
            body = torch.cat([text, *values, state])
            header = Header(FIRST, 0, 0, text.numel(), body.numel())
            with self._carrying("first parameters", keys):
                works += self._send(server, header, body)
        self._wait(works)

    def push(
        self, clock: int, computed_ns: int, gradients: Mapping[int, torch.Tensor], settings: Any
    ) -> Answered:
        """Pushes a step's gradients, and waits until the worker may continue.

        Args:
            clock: The step.
            computed_ns: Time that the worker computed for the step.
            gradients: Gradients by the index of the parameter; missing ones are left out.
            settings: Settings of the optimizer's parameter groups; None if they have not changed.

        Raises:
            ServerDiedError: A server has died.
        """
        works, replies = [], []
        for server, keys in enumerate(self._keys):
            encoded = [self._encode(gradients, key) for key in keys]
            text, body = write_body(settings, encoded)
            header = Header(PUSH, clock, computed_ns, text, body.numel())
            with self._carrying(f"push {clock}", keys):
                works += self._send(server, header, body)
        for server, keys in enumerate(self._keys):
            with self._carrying(f"parameters for step {clock + 1}", keys):
                replies.append(self._receive(server, works))
        self._wait(works)
        return self._answered(replies)

    def state(self) -> dict[int, KeyState]:
        """The state of the servers' optimizer by the index of the parameter, in its shape.

        Raises:
            ServerDiedError: A server has died.
        """
        pieces: dict[int, dict[str, dict[int, torch.Tensor]]] = {}
        for server, keys in enumerate(self._keys):
            with carrying("request for the state of the optimizer", ()):
                self._wait(self._send(server, Header(STATE, 0), None))
            size = torch.empty(1, dtype=torch.int64)
            self._wait([self._launch(dist.irecv, size, server, STATE_TAG)])
            data = torch.empty(int(size), dtype=torch.uint8)
            if data.numel():
                self._wait([self._launch(dist.irecv, data, server, STATE_TAG)])
            for key, state in zip(keys, read_states(data), strict=False):
                for name, values in state.items():
                    of_key = pieces.setdefault(key.parameter, {}).setdefault(name, {})
                    of_key[key.start] = values
        return {
            index: {
                name: self._whole(index, [parts[start] for start in sorted(parts)])
                for name, parts in of_parameter.items()
            }
            for index, of_parameter in pieces.items()
        }

    def finish(self, clock: int) -> Answered:
        """Pushes no more, and waits for the parameters at the end of all workers' training.

        Raises:
            ServerDiedError: A server has died.
        """
        works: list[dist.Work | None] = []
        replies = []
        for server in range(self._servers):
            with carrying("end", ()):
                works += self._send(server, Header(FINISH, clock), None)
        for server, keys in enumerate(self._keys):
            with self._carrying("parameters at the end", keys):
                replies.append(self._receive(server, works))
        self._wait(works)
        return self._answered(replies)

    def _encode(
        self, gradients: Mapping[int, torch.Tensor], key: Key
    ) -> Payload | torch.Tensor | None:
        gradient = gradients.get(key.parameter)
        if gradient is None:
            return None
        part = self._part(gradient, key)
        if self._codec is None:
            return part
        with Coding("encode", part.nbytes) as coding:
            payload = self._codec.encode(part, key=(key.parameter, key.start, key.stop))
            coding.bytes_out = payload.nbytes
        return payload

    def _whole(self, index: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not parts[0].dim():
            return parts[0]  # one number for a whole tensor is the same for each of its keys
        parameter = self._parameters[index]
        return torch.cat(list(parts)).view(parameter.shape).to(parameter.device)

    def _cut(self, state: Mapping[str, Any], key: Key) -> KeyState:
        """The part of a parameter's state that belongs to a key."""
        found = {}
        for name, value in state.items():
            if value is None:
                continue
            entry = torch.as_tensor(value)
            whole = entry.shape == self._parameters[key.parameter].shape
            found[name] = self._part(entry, key) if whole and name not in _OF_ALL else entry
        return found

    @staticmethod
    def _part(tensor: torch.Tensor, key: Key) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)[key.start : key.stop]
        return flat.to("cpu").contiguous()

    def _carrying(self, name: str, keys: Sequence[Key]) -> Any:
        return carrying(name, [self._parameters[key.parameter] for key in keys])

    def _send(self, server: int, header: Header, body: torch.Tensor | None) -> list[Any]:
        parts = [(header.tensor(), HEADER_TAG)]
        if body is not None:
            parts.append((body, BODY_TAG))
        return [self._launch(dist.isend, part, server, tag) for part, tag in parts]

    def _receive(self, server: int, works: list[Any]) -> torch.Tensor:
        data = torch.empty(reply_bytes(self._keys[server]), dtype=torch.uint8)
        works.append(self._launch(dist.irecv, data, server, REPLY_TAG))
        return data

    def _launch(self, operation: Any, tensor: torch.Tensor, server: int, tag: int) -> Any:
        end = "group_dst" if operation is dist.isend else "group_src"
        try:
            place = {end: self._workers + server}
            return _Flight(operation(tensor, group=self.group, tag=tag, **place), tensor)
        except RuntimeError as error:
            self._fail(error)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(error)

    def _answered(self, replies: Sequence[torch.Tensor]) -> Answered:
        values = {
            index: torch.empty(p.numel(), dtype=p.dtype) for index, p in enumerate(self._parameters)
        }
        found: list[Reply] = []
        for data, keys in zip(replies, self._keys, strict=True):
            reply, parts = read_reply(data, keys)
            found.append(reply)
            for key, part in zip(keys, parts, strict=True):
                values[key.parameter][key.start : key.stop] = part
        filled = all(reply.filled for reply in found)
        return Answered(min(reply.clock for reply in found), values, filled)

    def _fail(self, error: BaseException) -> None:
        """After a message failed: ends the training if a server has died.

        Raises:
            ServerDiedError: It has.
            RuntimeError: The message failed for another reason.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS / 2
        while not self._died and time.monotonic() < deadline:
            time.sleep(0.01)  # the lifeline breaks at the same time
        if self._died:
            raise ServerDiedError from error
        raise error

    def _server_died(self, server: int) -> None:
        self._died.append(server)

    def _end_process(self) -> None:
        time.sleep(_PATIENCE_SECONDS)
        # The training thread computes, or waits in a library that does not notice.
        super()._end_process()


class _Flight:
    """A message under way, with the tensor that has to live until its end."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        """Waits for its end."""
        assert self._work is not None
        self._work.wait()
