"""Chakra execution traces, encoded by hand from the field numbers of the format's schema.

No message class of ours takes part: a wrong field number in ours would otherwise go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def piece(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def attribute(name: str, value: int | bool | str) -> bytes:
    """bool_val is field 27, string_val 29, int64_val 9."""
    if isinstance(value, bool):
        content = number(27, value)
    elif isinstance(value, int):
        content = number(9, value)
    else:
        content = piece(29, value.encode())
    return piece(1, name.encode()) + content


def chakra_node(
    id: int,
    name: str,
    kind: int,
    *,
    start: int = 0,
    duration: int = 0,
    deps: Sequence[int] = (),
    parents: Sequence[int] = (),
    attributes: Mapping[str, int | bool | str] | None = None,
) -> bytes:
    """A node; times in microseconds."""
    return b"".join(
        [
            number(1, id),
            piece(2, name.encode()),
            number(3, kind),
            piece(4, b"".join(map(varint, parents))) if parents else b"",
            piece(5, b"".join(map(varint, deps))) if deps else b"",
            number(6, start) if start else b"",
            number(7, duration) if duration else b"",
            *(piece(10, attribute(*each)) for each in (attributes or {}).items()),
        ]
    )


def chakra_file(
    nodes: Iterable[bytes], attributes: Mapping[str, int | bool | str] | None = None
) -> bytes:
    """The metadata and the nodes, each with its length before it."""
    metadata = piece(1, b"1.0.0") + b"".join(
        piece(2, attribute(*each)) for each in (attributes or {}).items()
    )
    return b"".join(varint(len(each)) + each for each in [metadata, *nodes])
