"""Details of one event, and of the same message on the other ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ddltrace.analyzer.formatting.units import (
    NOT_KNOWN,
    bytes_text,
    instant_text,
    printable,
    time_text,
)
from ddltrace.dashboard.pages.event_launches import Launch, launch_of
from ddltrace.tracer.trace.schema import P2P_OPS

if TYPE_CHECKING:
    from ddltrace.dashboard.workspace import OpenTrace

_MAX_TENSORS: Final = 200
_OPPOSITE: Final = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class Part:
    """One rank's part of a message.

    Attributes:
        rank: Global rank.
        event: Row in that rank's events.
        arrival_ns: When the rank entered it, since the trace's first event.
        end_ns: When it completed there; None if that was not observed.
        wait_ns: Time until the last rank arrived; None if the record of a member is missing, which
            may have arrived later.
        transfer_ns: Time from the last arrival to the end; None if either is unknown, or the
            message did not complete here.
        lateness_ns: Arrival minus the median arrival of the other ranks; 0 without others.
        is_last: Whether this rank arrived last, among the known arrivals.
        is_completed: Whether it completed there, possibly at an unknown time.
    """

    rank: int
    event: int
    arrival_ns: int
    end_ns: int | None
    wait_ns: int | None
    transfer_ns: int | None
    lateness_ns: float
    is_last: bool
    is_completed: bool


@dataclass(frozen=True)
class TensorLine:
    """A tensor that an event concerns."""

    name: str
    shape: str
    size: str


@dataclass(frozen=True)
class Details:
    """The content of the details panel for one event.

    Attributes:
        title: The event's label.
        kind: Its kind in the trace's schema.
        facts: Labels and values, escaped for display.
        tensors: The tensors that it concerns.
        num_tensors: Their number; `tensors` may be truncated.
        parts: For a message, or for that of a gradient or a launch: its part on every rank that
            recorded it, by rank.
        missing_ranks: Members of its group without a record of it.
        launch: The launch that it belongs to, as the call or as what was launched.
        start_ns: Its start, as in the trace.
    """

    rank: int
    event: int
    title: str
    kind: str
    facts: list[tuple[str, str]]
    tensors: list[TensorLine] = field(default_factory=list)
    num_tensors: int = 0
    parts: list[Part] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)
    launch: Launch | None = None
    start_ns: int = 0


def describe(opened: OpenTrace, rank: int, event: int) -> Details:
    """Looks up one event.

    Args:
        rank: The event's rank.
        event: Its row in the rank's events.

    Raises:
        TraceError: The rank or the event does not exist.
    """
    row = opened.event(rank, event)
    known = {tensor.id: tensor for tensor in opened.trace.tensors(rank)}
    ids = row["tensors"] or []
    lines = []
    for number in ids[:_MAX_TENSORS]:
        tensor = known.get(number)
        if tensor is None:
            lines.append(TensorLine(f"tensor {number}", NOT_KNOWN, NOT_KNOWN))
        else:
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            lines.append(TensorLine(printable(tensor.name), shape, bytes_text(tensor.bytes)))
    launch = launch_of(opened, rank, event, row)
    message = row if row["kind"] == "message" else _message_of_gradient(opened, rank, row)
    if row["kind"] == "host" and launch is not None and len(launch.works) == 1:
        message = opened.timeline.indexes[rank].message(launch.works[0].event)
    parts, missing = ([], []) if message is None else _parts(opened, rank, message)
    return Details(
        rank=rank,
        event=event,
        title=_title(row, lines),
        kind=str(row["kind"]),
        facts=_facts(opened, rank, row) + _life(opened, rank, row, message),
        tensors=lines,
        num_tensors=len(ids),
        parts=parts,
        missing_ranks=missing,
        launch=launch,
        start_ns=row["start_ns"],
    )


def _title(row: dict[str, Any], tensors: list[TensorLine]) -> str:
    if row["kind"] == "message":
        return printable(row["op"] or row["name"] or "message")
    if row["kind"] == "step":
        return f"step {row['step']}"
    if row["kind"] == "gradient" and tensors and not row["name"]:
        return tensors[0].name
    return printable(row["name"] or row["kind"])


def _facts(opened: OpenTrace, rank: int, row: dict[str, Any]) -> list[tuple[str, str]]:
    origin = opened.trace.origin_ns
    start, end = row["start_ns"], row["end_ns"]
    facts = [("Rank", str(rank))]
    if end is None:
        ended = "ended at a time that is not known"
        unseen = ended if row["status"] == "ok" else "had not completed when last seen"
        facts.append(("Duration", unseen))
    elif end > start or row["kind"] != "gradient":
        facts.append(("Duration", time_text((end - start) / 1e3)))
    facts.append(("Start", instant_text((start - origin) / 1e3)))
    if row["enqueue_ns"] is not None:
        facts.append(("Enqueued", f"{time_text((start - row['enqueue_ns']) / 1e3)} before start"))
    if row["kind"] == "message" and row["id"] is not None:
        waited = _waits_for(opened.timeline.indexes[rank].waits, row["id"])
        if waited is not None:
            facts.append(("Host waited", time_text(waited / 1e3)))
    for label, column in (
        ("Step", "step"),
        ("Phase", "phase"),
        ("Lane", "lane"),
        ("Group", "group"),
        ("Number in group", "seq"),
        ("Peer", "peer"),
        ("Tag", "tag"),
        ("Element type", "dtype"),
        ("Shapes of inputs", "shapes"),
        ("Status", "status"),
        ("Times from", "clock"),
        ("Seen by", "seam"),
    ):
        if row[column] is not None:
            facts.append((label, printable(row[column])))
    for label, column in (
        ("Input", "bytes"),
        ("Output", "out_bytes"),
        ("On the wire", "wire_bytes"),
    ):
        if row[column] is not None:
            facts.append((label, f"{bytes_text(row[column])} ({row[column]:,} bytes)"))
    return facts


def _message_of_gradient(
    opened: OpenTrace, rank: int, row: dict[str, Any]
) -> dict[str, Any] | None:
    """The first message that carries a gradient and was enqueued after it was ready, in its
    step."""
    if row["kind"] != "gradient" or not row["tensors"] or row["step"] is None:
        return None
    messages = opened.timeline.indexes[rank].messages
    of_step = messages.filter(pc.equal(messages["step"], row["step"])).to_pylist()
    carrying = [
        (handed_over, message["event"], message)
        for message in of_step
        if row["tensors"][0] in (message["tensors"] or ())
        and (handed_over := _first_known(message["enqueue_ns"], message["start_ns"]))
        >= row["start_ns"]
    ]
    found: dict[str, Any] | None = min(carrying, default=(0, 0, None))[2]
    return found


def _life(
    opened: OpenTrace, rank: int, row: dict[str, Any], message: dict[str, Any] | None
) -> list[tuple[str, str]]:
    """The further times of a gradient, relative to its readiness; empty for other events."""
    if row["kind"] != "gradient" or message is None:
        return []
    ready = row["start_ns"]
    number = "" if message["seq"] is None else f" {message['seq']}"
    life = [("Message", printable(f"{message['op'] or 'message'}{number}"))]
    times = [
        ("Message enqueued", message["enqueue_ns"]),
        ("Message in flight", message["start_ns"]),
    ]
    times.append(("Message complete", message["end_ns"]))
    name = opened.trace.tensor_names(rank).get(row["tensors"][0])
    life += [
        (label, f"{time_text((time - ready) / 1e3)} after ready")
        for label, time in times
        if time is not None
    ]
    analysis = opened.analysis_if_made
    usual = [] if analysis is None else [t for t in analysis.tensors if t.name == name]
    for tensor in usual:
        for label, us in (("Waited for", tensor.waited_us), ("Updated", tensor.updated_us)):
            if us is not None and tensor.ready_us is not None:
                text = f"{time_text(us - tensor.ready_us)} after ready, median of the steps"
                life.append((label, text))
    return life


def _first_known(*times: int | None) -> int:
    return next(time for time in times if time is not None)


def _waits_for(waits: pa.Table, message: int) -> int | None:
    """How long the host waited for a message, in ns; None if no wait was recorded."""
    found = waits.filter(pc.fill_null(pc.equal(waits["parent"], message), False))
    ended = [w for w in found.to_pylist() if w["end_ns"] is not None]
    return sum(w["end_ns"] - w["start_ns"] for w in ended) if ended else None


def _parts(opened: OpenTrace, rank: int, row: dict[str, Any]) -> tuple[list[Part], list[int]]:
    """A message on all its ranks, and the members without a record of it."""
    if row["seq"] is None or row["group"] is None:
        return [], []
    if row["op"] in P2P_OPS:
        members = sorted({rank, row["peer"]} if row["peer"] is not None else {rank})
    else:
        members = list(opened.trace.group_ranks(row["group"])) or list(opened.trace.ranks)
    found: list[tuple[int, dict[str, Any]]] = []
    missing = []
    for member in members:
        same = _same_message(opened, member, rank, row) if member in opened.trace.ranks else None
        if same is None:
            missing.append(member)
        else:
            found.append((member, same))
    if not found:
        return [], missing
    arrivals = [same["start_ns"] for _, same in found]
    last = None if missing else max(arrivals)
    origin = opened.trace.origin_ns
    parts = []
    for place, (member, same) in enumerate(found):
        others = arrivals[:place] + arrivals[place + 1 :] or [arrivals[place]]
        parts.append(_part(member, same, origin, last, statistics.median(others)))
    return parts, missing


def _part(rank: int, row: dict[str, Any], origin: int, last: int | None, others: float) -> Part:
    """A rank's part.

    Args:
        row: Its event.
        origin: The trace's first instant.
        last: The arrival of the last member; None if unknown.
        others: The median arrival of the other ranks.
    """
    arrival, end = row["start_ns"], row["end_ns"]
    completed = row["status"] not in ("open", "failed")
    return Part(
        rank=rank,
        event=row["event"],
        arrival_ns=arrival - origin,
        end_ns=None if end is None else end - origin,
        wait_ns=None if last is None else last - arrival,
        transfer_ns=None if last is None or end is None or not completed else end - last,
        lateness_ns=arrival - others,
        is_last=arrival == last,
        is_completed=completed,
    )


def _same_message(
    opened: OpenTrace, member: int, rank: int, row: dict[str, Any]
) -> dict[str, Any] | None:
    """Finds a rank's part of a message."""
    messages = opened.timeline.indexes[member].messages
    mask = pc.and_(pc.equal(messages["seq"], row["seq"]), pc.equal(messages["group"], row["group"]))
    for other in messages.filter(pc.fill_null(mask, False)).to_pylist():
        if _belong_together(row, rank, other, member):
            found: dict[str, Any] = other
            return found
    return None


def _belong_together(row: dict[str, Any], rank: int, other: dict[str, Any], member: int) -> bool:
    if row["op"] not in P2P_OPS:
        return bool(other["op"] == row["op"])
    if other["tag"] != row["tag"]:
        return False
    if member == rank:
        return bool(other["op"] == row["op"] and other["peer"] == row["peer"])
    return bool(other["op"] == _OPPOSITE[row["op"]] and other["peer"] == rank)
