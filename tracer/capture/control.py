"""Takes orders to switch this rank's recording, and passes them on to the job's other ranks.

Each rank listens on a local socket in a directory that only its user can enter. Whoever gives an
order asks one rank; that rank reaches the others of its launcher through their sockets, whose
places are in the trace, and those of other launchers through `launcher_links.py`. All threads here
wait in the kernel until somebody asks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.capture.job_order import Member, Order, ask_all, carry_out
from ddltrace.tracer.capture.late_rank import LOOK, MessageTimes
from ddltrace.tracer.capture.recording_switch import Change, RecordingSwitch
from ddltrace.tracer.connections.requests import (
    NAME,
    PREFIX,
    ask,
    is_of_this_user,
    receive,
    remove_socket,
    send,
)
from ddltrace.tracer.trace.liveness import takes_orders
from ddltrace.tracer.trace.run_files import read_sidecars
from ddltrace.tracer.trace.run_info import RankInfo

_ANSWER_TIMEOUT_S: Final = 5.0
_REQUEST_TIMEOUT_S: Final = 3.0
_MOST_WAITING: Final = 16
_SHORT_FOLDER: Final = "/tmp"

Fault = Callable[[str, Exception], None]


class Control:
    """Listens for orders.

    Args:
        info: This rank; `RankInfo.control` is set.
        directory: The trace directory.
        switch: Switches this rank's recording.
        default_level: The level of an order that names none.
        fault: Called with errors.

    Attributes:
        switch: Switches this rank's recording.
        times: This rank's times in collectives, in the steps of a look for a late rank.
        order_job: Carries out an order on all ranks of the job, not only those of this launcher.
        job_members: Returns the ranks of the job that can be asked.

    Raises:
        OSError: No socket can be created.
    """

    def __init__(
        self,
        info: RankInfo,
        directory: Path,
        switch: RecordingSwitch,
        default_level: str,
        fault: Fault,
    ) -> None:
        self._info = info
        self._directory = directory
        self.switch = switch
        self._default_level = default_level
        self._fault = fault
        self._closed = False
        self.times = MessageTimes()
        self.order_job: Callable[[Order], dict[str, Any]] = self.carry_out_here
        self.job_members: Callable[[], Sequence[Member]] = self.members
        self._listener, info.control = _listener()

    def start(self) -> None:
        """Starts to listen."""
        threading.Thread(target=self._listen, name="ddltrace-control", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        remove_socket(self._info.control, os.getpid())
        self._info.control = ""

    def close_after_fork(self) -> None:
        """In a forked child: closes its copy of the socket, which belongs to the parent."""
        self._closed = True
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A thread of its own: a rank that passes an order on is asked itself, too.
            threading.Thread(
                target=self._serve, args=(connection,), name="ddltrace-order", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                if not is_of_this_user(connection):
                    return
                request = receive(connection)
                if request is not None:
                    send(connection, self.answer(request))
        except OSError:
            pass  # whoever asked has gone
        except Exception as error:  # noqa: BLE001 - a thread that ends so would print
            self._fault("control", error)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request; see `job_order.py` for what is asked."""
        try:
            match request.get("do"):
                case "state":
                    return self._state()
                case "plan":
                    return self._plan(request)
                case "times":
                    return {"times": self.times.sums(self._info.groups)}
                case "order":
                    return self.carry_out(Order.from_json(request))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            return {"error": f"not a request: {error!r:.100}"}
        return {"error": "not a request"}

    def _state(self) -> dict[str, Any]:
        marks = self.switch.marks
        return {
            "directory": str(self._directory),
            "world_size": self._info.world_size,
            "following": self.switch.following,
            "planned": self.switch.planned,
            "step_ns": self.switch.step_ns,
            "default_level": self._default_level,
            "marks": None if marks is None else marks.ended(),
        }

    def _plan(self, request: dict[str, Any]) -> dict[str, Any]:
        changes = [
            Change(step, level, request.get("reason") or "") for step, level in request["changes"]
        ]
        if changes[0].reason == LOOK and len(changes) == 2:
            # In the first one, messages of the step before may still be under way.
            self.times.follow(range(changes[0].step + 1, changes[1].step))
        changes[0] = replace(changes[0], called=request.get("called"))
        if not request.get("level_only"):
            return {"in_time": self.switch.plan(changes)}
        step, level = changes[0].step, changes[0].level
        if level is None:
            raise ValueError("no level")
        self._default_level = level
        return {"in_time": self.switch.plan_level(step, level)}

    def carry_out(self, order: Order) -> dict[str, Any]:
        """Carries out an order on all ranks of the job that can be reached."""
        return self.order_job(order)

    def ask_job(self, request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Asks all ranks of the job that can be reached; returns the answers, by rank."""
        return ask_all(self.job_members(), request, {})

    def carry_out_here(self, order: Order) -> dict[str, Any]:
        """Carries out an order from this process, on all ranks that it can ask."""
        return carry_out(order, self.job_members())

    def members(self) -> list[Member]:
        """The ranks of this launcher that run, this one among them."""
        newest: dict[int, RankInfo] = {}
        for info in read_sidecars(self._directory, []):
            if takes_orders(info):
                former = newest.get(info.rank)
                if former is None or former.attempt <= info.attempt:
                    newest[info.rank] = info
        asks = {
            rank: partial(ask, info.control, timeout_s=_ANSWER_TIMEOUT_S)
            for rank, info in newest.items()
            if rank != self._info.rank
        }
        own = Member(self._info.rank, self.answer)
        return [own, *(Member(rank, send) for rank, send in sorted(asks.items()))]


def _listener() -> tuple[socket.socket, str]:
    """A local socket in a directory of its own, and its path.

    Raises:
        OSError: There is no place for it, or all paths are too long for a socket.
    """
    for base in (None, _SHORT_FOLDER):
        listener = socket.socket(socket.AF_UNIX)
        path = ""
        try:
            path = os.path.join(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=base), NAME)
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(_MOST_WAITING)
        except OSError as error:
            listener.close()
            remove_socket(path, os.getpid())
            failure = error
        else:
            return listener, path
    raise failure
