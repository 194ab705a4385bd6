"""Events of the Chrome trace format, decoded a chunk at a time with only the fields used.

Kineto, Horovod's timeline and many others write this format: an object with ``traceEvents``,
or the bare list, which may lack its closing bracket. Files of gigabytes are common, so the
list is cut between two events every few megabytes and each piece is decoded straight into
typed objects. A cut in the wrong place is always detected, because the piece is then not balanced
JSON and cannot be decoded.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Union

import msgspec

from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.memory_limit import check_memory
from ddltrace.tracer.errors import TraceError

_CHUNK_BYTES: Final = 1 << 18
"""The objects of a chunk take a few times that: they fit into a core's own cache."""

_LONG_EVENT_BYTES: Final = 4 << 20
_MAX_PENDING_BYTES: Final = 256 << 20
"""A larger event, or a larger head or tail of the file, is treated as damage."""

_MAX_META_BYTES: Final = 8 << 20
"""As objects of Python, lists and mappings take up to thirty times their text."""

_TRIES: Final = 16
_SHAPES_MARK: Final = b'"Input Dims"'
_SHAPES: Final = re.compile(rb'"Input Dims"\s*:\s*(\[[\[\]\d,\s]*\])')
_DIGIT: Final = re.compile(rb"\d")
_MAX_SHAPES: Final = 400
_TAIL_BYTES: Final = 1 << 16
_LIST_START: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN_EVENTS: Final = re.compile(rb"\}\s*,\s*\{")
_LIST_END: Final = re.compile(rb"\}\s*\](?=\s*(?:[,}]|\Z))")
_PHASE: Final = b'"ph"'
_CATEGORY: Final = re.compile(rb'"cat"\s*:\s*"([\w ]{1,40})"')
_KEY: Final = re.compile(r'[{,]\s*"([^"\\\x00-\x1f]{1,100})"\s*:\s*')
_AFTER_VALUE: Final = re.compile(r"\s*([,}])")
_TOLERANT: Final = json.JSONDecoder(strict=False)
_MOST_JOINED: Final = 8
"""Pieces that one event may fall into when it is cut at the objects nested in it."""

_MAX_SHOWN: Final = 5
_EPOCH: Final = "start_time_since_epoch_in_micros"
_EMPTY: Final = msgspec.Raw(b"")


INTERVAL_BYTES: Final = 800
"""Memory of an event that becomes an `Interval`, its arguments and a row, all Python objects."""

UNDECODABLE: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError)
"""Exceptions of decoding damaged JSON."""


class Args(
    msgspec.Struct,
    gc=False,
    rename={
        "collective": "Collective name",
        "in_elements": "In msg nelems",
        "out_elements": "Out msg nelems",
        "in_splits": "In split size",
        "group_size": "Group size",
        "group_name": "Process Group Name",
        "group_description": "Process Group Description",
        "group_ranks": "Process Group Ranks",
        "seq": "Seq",
        "source": "Src Rank",
        "destination": "Dst Rank",
        "number": "seq",
        "dims": "Input Dims",
        "types": "Input type",
        "inputs": "Concrete Inputs",
    },
):
    """The arguments of an event that describe a message."""

    bytes: Any = None
    collective: Any = None
    in_elements: Any = None
    out_elements: Any = None
    in_splits: Any = None
    group_size: Any = None
    dtype: Any = None
    shape: Any = None
    group_name: Any = None
    group_description: Any = None
    group_ranks: Any = None
    seq: Any = None
    source: Any = None
    destination: Any = None
    dims: Any = None
    types: Any = None
    inputs: Any = None
    number: Any = None
    status: Any = None
    op: Any = None
    group: Any = None
    peer: Any = None
    step: Any = None
    phase: Any = None
    tag: Any = None
    out_bytes: Any = None
    kind: Any = None


NO_ARGS: Final = Args()


class Link(msgspec.Struct, gc=False, rename={"bandwidth": "memory bandwidth (GB/s)"}):
    """The arguments that link device work to its stream and to the call that launched it."""

    stream: int | str | None = None
    correlation: int | None = None
    bytes: int | float | None = None
    bandwidth: Any = None


NO_LINK: Final = Link()


class _Timed(msgspec.Struct, gc=False):
    ts: float
    pid: int | str | None = None


class _OnThread(_Timed, gc=False):
    tid: int | str | None = None


class _Named(_OnThread, gc=False):
    cat: str = ""
    name: str = ""


class _Async(_Timed, gc=False):
    cat: str = ""
    id: int | str | None = None


class Complete(_Named, gc=False, tag_field="ph", tag="X"):
    """An interval."""

    dur: float = math.nan
    args: msgspec.Raw = _EMPTY


class Begin(_Named, gc=False, tag_field="ph", tag="B"):
    """The start of an interval of a thread; intervals of a thread nest."""


class End(_OnThread, gc=False, tag_field="ph", tag="E"):
    """The end of the thread's innermost interval."""

    args: msgspec.Raw = _EMPTY


class AsyncBegin(_Async, gc=False, tag_field="ph", tag="b"):
    """The start of an interval that belongs to no thread."""

    name: str = ""


class AsyncEnd(_Async, gc=False, tag_field="ph", tag="e"):
    """The end of the asynchronous interval with the same category and id."""


class Instant(_Named, gc=False, tag_field="ph", tag="i"):
    """A point in time."""

    ts: float = 0.0


class MetadataArgs(msgspec.Struct, gc=False, rename={"epoch_us": _EPOCH}):
    """Arguments of metadata: a name, or the Unix time of time 0 in Horovod's timelines."""

    name: Any = None
    epoch_us: Any = None


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """A name of a process or a thread."""

    name: str = ""
    ts: Any = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: MetadataArgs | None = None


def _ignored(phase: str) -> type[msgspec.Struct]:
    return msgspec.defstruct("Ignored", [], gc=False, tag_field="ph", tag=phase)


_IGNORED: Final = tuple(_ignored(phase) for phase in "IRPnstfCSTpFNODVvc()")
_USED: Final = (Complete, Begin, End, AsyncBegin, AsyncEnd, Instant, Metadata)
_EVENT: Final[Any] = Union[_USED + _IGNORED]  # noqa: UP007 - built at run time
_EVENTS: Final[msgspec.json.Decoder[list[Any]]] = msgspec.json.Decoder(list[_EVENT])
_ONE: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(_EVENT, strict=False)
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


_ARGS: Final = msgspec.json.Decoder(Args)
_LINK: Final = msgspec.json.Decoder(Link)
_NOTHING: Final = b"{}"
_LINKS: Final = msgspec.json.Decoder(list[Link])


def args_of(raw: msgspec.Raw) -> Args:
    """Decodes an event's arguments; those that are damaged count as none.

    Arguments are decoded only where they are looked at: for most events they never are.
    """
    try:
        return _ARGS.decode(raw) if raw else NO_ARGS
    except UNDECODABLE:
        return NO_ARGS


def links_of(raws: list[msgspec.Raw]) -> list[Link]:
    """Decodes the arguments that link events; damaged arguments count as missing."""
    try:
        # All at once is quicker; each is whole, else the event around it were undecodable.
        texts = b",".join([raw or _NOTHING for raw in raws])
        return _LINKS.decode(b"".join((b"[", texts, b"]")))
    except UNDECODABLE:
        return [_link_of(raw) for raw in raws]


def _link_of(raw: msgspec.Raw) -> Link:
    try:
        return _LINK.decode(raw) if raw else NO_LINK
    except UNDECODABLE:
        return NO_LINK


def shapes_of(raws: list[msgspec.Raw]) -> list[str | None]:
    """The shapes of operators' inputs as JSON without spaces; None where they are not recorded.

    Such as ``[[64,3],[3]]``: one list for each input, empty for an input that is not a tensor.
    """
    texts = [bytes(raw) for raw in raws]
    return [_shapes_in(text) if _SHAPES_MARK in text else None for text in texts]


def _shapes_in(text: bytes) -> str | None:
    match = _SHAPES.search(text)
    if match is None or not _DIGIT.search(match[1]):
        return None
    return _cut(match[1].translate(None, b" \n\t\r").decode())


def input_shapes(dims: Any) -> str | None:
    """The shapes of an operator's inputs from its decoded arguments, as `shapes_of` gives them."""
    if not isinstance(dims, list):
        return None
    text = msgspec.json.encode(dims)
    return _shapes_in(b'"Input Dims":' + text)


def _cut(shapes: str) -> str:
    if len(shapes) <= _MAX_SHAPES:
        return shapes
    # At most so much, to the end of a whole input.
    return shapes[: shapes.rfind("]", 0, _MAX_SHAPES) + 1] + ",...]"


class EventFile:
    """Iterates over chunks of a file's events, as long as they fit into the memory limit.

    Args:
        path: The file.
        event_bytes: Memory that the reader takes for one event until its trace is complete.

    Attributes:
        more_bytes: Memory that the reader takes besides, which it keeps up to date.
        meta: After the iteration: the file's top-level entries besides the events.
        damage: After the iteration: why the file's end is missing; None if it is whole.
    """

    def __init__(self, path: Path, event_bytes: int) -> None:
        self.path = path
        self.more_bytes = 0
        self.meta: dict[str, Any] = {}
        self._event_bytes = event_bytes
        self._events = 0
        self._lost: Counter[str] = Counter()
        self._lost_entries: list[str] = []
        self.damage: str | None = None
        self._separator = b""

    def __iter__(self) -> Iterator[list[Any]]:
        blocks = Blocks(self.path)
        for events in self._chunks(blocks):
            self._events += len(events)
            needed = self._events * self._event_bytes + self.more_bytes
            check_memory(self.path, needed, blocks.read_bytes)
            yield events

    def losses(self) -> list[str]:
        """After the iteration: notes on what is missing because the file is damaged."""
        notes = []
        if self.damage is not None:
            notes.append(f"{self.damage}: what stands behind the damage is missing")
        if lost := self._lost.total():
            kinds = [f"{name}: {number}" for name, number in self._lost.most_common(_MAX_SHOWN)]
            verb = "events are" if lost > 1 else "event is"
            notes.append(f"{lost} {verb} damaged and left out ({', '.join(kinds)})")
        if self._lost_entries:
            shown = ", ".join(repr(name[:60]) for name in self._lost_entries[:_MAX_SHOWN])
            notes.append(f"damaged entries beside the events are left out: {shown}")
        return notes

    def _chunks(self, blocks: Blocks) -> Iterator[list[Any]]:
        source = iter(blocks)
        start, pending = self._find_list(source)
        bare = start == b"["
        pieces, size, wanted = [pending], len(pending), _CHUNK_BYTES
        for block in source:
            pieces.append(block)
            size += len(block)
            if size < wanted:
                continue
            pending = b"".join(pieces)
            cut = self._cut(pending)
            if cut is not None:
                end, events = cut
                pending = pending[end:]
                wanted = _CHUNK_BYTES
                yield events
            elif size > _MAX_PENDING_BYTES:
                raise TraceError(
                    f"{self.path}: {size >> 20} MB without an end of an event; "
                    "this is not a trace, or its list of events is damaged"
                )
            else:
                wanted = _next_look(size)
            pieces, size = [pending], len(pending)
        self.damage = blocks.damage
        yield self._rest(b"".join(pieces), bare)

    def _find_list(self, source: Iterator[bytes]) -> tuple[bytes, bytes]:
        """Reads up to the first event.

        Returns:
            ``[`` for a bare list, else ``{``; and what was read behind the list's bracket.
        """
        pending = b""
        for pending in _growing(source):
            text = pending.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                return b"[", text[1:]
            places = list(_LIST_START.finditer(pending))
            for match in places:
                head = pending[: match.end()].lstrip(b"\xef\xbb\xbf")
                try:
                    self._keep_meta(_OBJECT.decode(head + b"]}"))
                except UNDECODABLE:
                    continue  # the words stand inside something else
                return b"{", pending[match.end() :]
            if places and text.startswith(b"{"):  # something before the list is damaged
                self._salvage_entries(pending[: places[0].start()])
                return b"{", pending[places[0].end() :]
            if text and not text.startswith(b"{"):
                break
            if len(pending) > _MAX_PENDING_BYTES:
                break
        if not pending.strip():
            raise TraceError(f"{self.path} is empty")
        raise TraceError(f"{self.path} is not a trace: no list of events (traceEvents) found in it")

    def _cut(self, pending: bytes) -> tuple[int, list[Any]] | None:
        """Decodes the events up to the last cut between two events that can be found.

        Returns:
            Where the next event begins, and the events; None if no cut was found.
        """
        for position, separator in self._cuts(pending):
            # One copy: a slice would be a second one.
            text = b"".join((b"[", memoryview(pending)[: position + 1], b"]"))
            events = self._decode(text)
            if events is not None:
                self._separator = separator
                return position + len(separator) - 1, events
        if len(pending) < _LONG_EVENT_BYTES:
            return None  # perhaps one long event: read on
        for position, separator in self._cuts(pending):
            return position + len(separator) - 1, self._salvage(pending[: position + 1])
        return None

    def _cuts(self, pending: bytes) -> Iterator[tuple[int, bytes]]:
        """Places where a cut may be, from the end, and what stands there.

        A writer separates events in one style, which no object nested in an event has: that
        style first. Writers that change it are rare; for them, anything that looks like it.
        """
        if not self._separator:
            self._separator = _first_separator(pending)
        position = len(pending)
        for _ in range(_TRIES if self._separator else 0):
            position = pending.rfind(self._separator, 0, position)
            if position < 0:
                break
            yield position, self._separator
        tail = max(0, len(pending) - _TAIL_BYTES)
        matches = list(_BETWEEN_EVENTS.finditer(pending, tail))[-_TRIES:]
        for match in reversed(matches):
            yield match.start(), match.group()

    def _rest(self, pending: bytes, bare: bool) -> list[Any]:
        """Decodes the last events and what stands behind the list."""
        if bare:
            for ending in (b"", b"]"):
                events = self._decode(b"[" + pending.rstrip().rstrip(b",") + ending)
                if events is not None:
                    return events
        else:
            try:
                entries = _OBJECT.decode(b'{"traceEvents":[' + pending)
                events = self._decode(bytes(entries.pop("traceEvents")))
                if events is not None:
                    self._keep_meta(entries)
                    return events
            except UNDECODABLE:
                pass
        # Zeros stand where a file system lost the last blocks.
        text = pending.rstrip(b"\0 \t\r\n")
        end = self._end_of_list(text)
        if end is None:
            whole = bare and text.rstrip(b",").endswith(b"}")
        else:
            whole = self._salvage_entries(text[end:]) or bare
            text = text[:end].rstrip(b"] \t\r\n")
        if not whole and self.damage is None:
            self.damage = "the file is cut off or damaged"
        return self._salvage(text, is_cut=end is None and not whole)

    def _end_of_list(self, text: bytes) -> int | None:
        """Where the list of events ends, behind its bracket; None if it does not."""
        last = max(text.rfind(_PHASE), 0)
        ends = list(_LIST_END.finditer(text, last))
        begin = max((m.end() - 1 for m in _BETWEEN_EVENTS.finditer(text, 0, last)), default=0)
        # Lists that are nested in the last event end before it is whole.
        for match in ends[:_TRIES]:
            if self._one(text[begin : match.start() + 1]) is not None:
                return match.end()
        return ends[0].end() if ends else None

    def _decode(self, text: bytes) -> list[Any] | None:
        """Events of a JSON list; None if it is not valid JSON."""
        try:
            return _EVENTS.decode(text)
        except msgspec.ValidationError:
            pass  # valid so far, but a field is of an unexpected type
        except UNDECODABLE:
            return None
        try:
            raws = _RAWS.decode(text)
        except UNDECODABLE:
            return None
        return self._decode_each(map(bytes, raws))

    def _decode_each(self, texts: Iterator[bytes]) -> list[Any]:
        events = []
        for text in texts:
            event = self._one(text)
            if event is None:
                self._lose(text)
            else:
                events.append(event)
        return events

    def _one(self, text: bytes) -> Any:
        """One event; None if it is damaged."""
        try:
            return _ONE.decode(text)
        except UNDECODABLE:
            return None

    def _lose(self, text: bytes) -> None:
        """Counts a damaged event, by its category where that can be read."""
        found = _CATEGORY.search(text)
        self._lost[found[1].decode() if found else "of unknown category"] += 1

    def _salvage(self, text: bytes, *, is_cut: bool = False) -> list[Any]:
        """Decodes one event at a time, and leaves out what cannot be decoded.

        Args:
            text: The events.
            is_cut: Whether the text ends inside its last event, which is then not counted.
        """
        text = text.strip()
        cuts = list(_BETWEEN_EVENTS.finditer(text))
        starts = [0, *(match.end() - 1 for match in cuts)]
        ends = [*(match.start() + 1 for match in cuts), len(text)]
        events: list[Any] = []
        number, lost_before = 0, False
        while number < len(starts):
            # An event in which objects are nested may be in several pieces.
            for last in range(number, min(number + _MOST_JOINED, len(starts))):
                event = self._one(text[starts[number] : ends[last]])
                if event is not None:
                    events.append(event)
                    number, lost_before = last + 1, False
                    break
            else:
                piece = text[starts[number] : ends[number]]
                is_rest = lost_before and _PHASE not in piece
                number += 1
                if piece and not is_rest and not (is_cut and number == len(starts)):
                    self._lose(piece)
                lost_before = True
        return events

    def _salvage_entries(self, text: bytes) -> bool:
        """Keeps the entries of a damaged object that can be read.

        Args:
            text: What stands before or behind the list of events.

        Returns:
            Whether the object's end was found.
        """
        if len(text) > _MAX_META_BYTES:
            self._lost_entries.append("all")
            return text.endswith(b"}")
        words = text.decode("utf-8", "replace")
        position, is_closed = 0, words.strip() == "}"
        while match := _KEY.search(words, position):
            position, is_closed = match.end(), False
            try:
                value, end = _TOLERANT.raw_decode(words, position)
            except (ValueError, RecursionError):
                self._lost_entries.append(match[1])
                continue
            if after := _AFTER_VALUE.match(words, end):
                self.meta[match[1]] = value
                position, is_closed = after.start(1), after[1] == "}"
            else:
                self._lost_entries.append(match[1])  # cut off: a number may lack digits
        return is_closed

    def _keep_meta(self, entries: dict[str, msgspec.Raw]) -> None:
        for key, raw in entries.items():
            if key == "traceEvents":
                continue
            if len(bytes(raw)) > _MAX_META_BYTES:
                self._lost_entries.append(key)
                continue
            try:
                self.meta[key] = msgspec.json.decode(raw)
            except UNDECODABLE:
                self._lost_entries.append(key)


def _growing(source: Iterator[bytes]) -> Iterator[bytes]:
    """All that was read so far, each time that it is worth another look, and at the end."""
    pieces: list[bytes] = []
    size = wanted = 0
    for block in source:
        pieces.append(block)
        size += len(block)
        if size >= wanted:
            pieces, wanted = [b"".join(pieces)], _next_look(size)
            yield pieces[0]
    if len(pieces) > 1:
        yield b"".join(pieces)


def _next_look(size: int) -> int:
    """How much to read before what was looked through in vain is looked through again.

    Twice as much each time: however long an event is, the work is linear in its length.
    """
    return min(2 * size, _MAX_PENDING_BYTES + 1)


def _first_separator(pending: bytes) -> bytes:
    """The bytes between the first two events, from brace to brace.

    Writers use one style throughout, whose line breaks and spaces distinguish events from nested
    objects.
    """
    for number, match in enumerate(_BETWEEN_EVENTS.finditer(pending)):
        if number > _TRIES:
            break
        try:
            _ONE.decode(pending[: match.start() + 1])
        except UNDECODABLE:
            continue
        return match.group()
    return b""
