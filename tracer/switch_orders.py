"""Orders to a job that runs: to record, to stop, or to change the level of detail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.connections.requests import NAME, PREFIX, ask
from ddltrace.tracer.errors import DdltraceError, UsageError
from ddltrace.tracer.trace.liveness import takes_orders

_TIMEOUT_S: Final = 30.0


def ranges_text(ranks: list[int]) -> str:
    """Ranks as ranges, such as ``0-3,7``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def give_order(target: str, order: dict[str, Any]) -> dict[str, Any]:
    """Gives an order to the job, through the first of its ranks that answers.

    Args:
        target: The trace directory, or the process id of the launcher or of a rank, on this host.
        order: ``action``, which is ``on``, ``off`` or ``level``, with its ``steps``, ``level`` and
            ``ranks``.

    Returns:
        The first ``step`` of the change, the ``ranks`` that follow, those that are ``missing``, and
        the ``reasons`` of these.

    Raises:
        UsageError: The target is not a running job of this user on this host.
        DdltraceError: No rank carried it out.
    """
    paths = list(sockets_of(target))
    if not paths:
        raise UsageError(
            f"{target}: no rank of a running job was found here that takes orders (is the job on "
            "another host, of another user, or has it not joined its process group yet?)"
        )
    failure: OSError | None = None
    for path in paths:
        try:
            answer = ask(path, {"do": "order", **order}, _TIMEOUT_S)
        except OSError as error:
            failure = error
            continue
        if "error" in answer:
            raise DdltraceError(f"{target}: {str(answer['error'])[:200]}")
        return answer
    raise DdltraceError(f"{target}: no rank answers: {failure}")


def sockets_of(target: str) -> Iterator[str]:
    """The sockets on which the job's ranks of this host take orders."""
    if target.isdigit() and not Path(target).exists():
        yield from sockets_of_process(int(target))
    else:
        yield from _sockets_of_trace(Path(target))


def _sockets_of_trace(directory: Path) -> Iterator[str]:
    """The sockets of the ranks of this host that record into a directory or its parts."""
    from ddltrace.tracer.trace.run_files import read_run_file, read_sidecars
    from ddltrace.tracer.trace.trace_files import parts_of

    read_run_file(directory)
    for folder in (directory, *parts_of(directory)):
        infos = sorted(read_sidecars(folder, []), key=lambda info: (-info.attempt, info.rank))
        for info in infos:
            if takes_orders(info):
                yield info.control


def sockets_of_process(pid: int) -> Iterator[str]:
    """The sockets of a process and of the processes below it."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error as error:
        raise UsageError(f"process {pid} cannot be looked at: {error}") from error
    for member in family:
        try:
            connections = member.net_connections(kind="unix")
        except psutil.Error:
            continue  # it has ended, or belongs to another user
        for connection in connections:
            path = Path(str(connection.laddr))
            if path.name == NAME and path.parent.name.startswith(f"{PREFIX}{member.pid}-"):
                yield str(path)
