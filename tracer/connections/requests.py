"""Questions and answers between processes of one user: a line of JSON each, on a local socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Final

NAME: Final = "control"
"""File name of a socket, in a directory of its own that only its owner can enter."""

PREFIX: Final = "ddltrace-"
"""What the name of that directory begins with; the process id follows."""

_MOST_BYTES: Final = 1 << 20
_CREDENTIALS: Final = struct.Struct("3i")


def ask(path: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Sends a request to a process of the same user.

    Args:
        path: The socket on which it listens.
        timeout_s: Longest time until the answer.

    Returns:
        The answer.

    Raises:
        OSError: Nobody of this user listens there, or does not answer in time.
    """
    _check_owner(path)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        if not is_of_this_user(connection):
            raise PermissionError(f"{path} belongs to another user")
        return exchange(connection, request)


def exchange(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request on a connection and waits for its answer.

    Raises:
        OSError: There is none.
    """
    send(connection, request)
    answer = receive(connection)
    if answer is None:
        raise ConnectionError("the other end closed the connection")
    return answer


def send(connection: socket.socket, value: dict[str, Any]) -> None:
    """Sends one line of JSON."""
    connection.sendall(json.dumps(value).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Reads one line of JSON, and nothing beyond; None at the end of the connection.

    Raises:
        OSError: The line is too long, damaged, or does not come in time.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        # The other end waits for an answer, so nothing follows the line.
        part = connection.recv(min(65536, _MOST_BYTES + 1 - len(line)))
        if not part:
            return None
        line += part
        if len(line) > _MOST_BYTES:
            raise ConnectionError("the line is too long")
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConnectionError("the line is not JSON") from error
    if not isinstance(value, dict):
        raise ConnectionError("the line is not a JSON object")
    return value


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the other end of a local socket is a process of this user, or of root."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True  # not on Linux: the directory is this user's
    packed = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1] in {os.geteuid(), 0}


def remove_socket(path: str, pid: int) -> None:
    """Removes the socket of a process and its directory, if that is one of this user's.

    Args:
        path: The socket; empty for none.
        pid: The process.
    """
    with contextlib.suppress(OSError):
        if path and Path(path).parent.name.startswith(f"{PREFIX}{pid}-"):
            _check_owner(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.rmdir(Path(path).parent)


def _check_owner(path: str) -> None:
    """The path may come from a trace that somebody else wrote."""
    folder = Path(path).parent
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if (
            Path(path).name == NAME
            and stat.S_ISDIR(status.st_mode)
            and status.st_uid in {os.geteuid(), 0}
            and not status.st_mode & 0o022
        ):
            return
    raise PermissionError(f"{path} is not a socket of this user's job")
