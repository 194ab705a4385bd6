"""The messages of Chakra's execution traces, built at run time.

The names and numbers are those of ``schema/protobuf/et_def.proto`` of
https://github.com/mlcommons/chakra, version 1.0. A file is a sequence of messages, each with its
length before it as a varint: one ``GlobalMetadata``, then the ``Node`` messages of one rank.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ddltrace.analyzer.importers.blocks import Blocks

VERSION: Final = "1.0.0"

INVALID, METADATA, MEM_LOAD, MEM_STORE, COMP, SEND, RECV, COLLECTIVE = range(8)
"""Values of ``NodeType``."""

NODE_TYPES: Final = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
    "STORAGE_NODE",
    "BATCH_NODE",
    "CHECKPOINT_NODE",
)
COLLECTIVES: Final[Mapping[int, str]] = {
    0: "all_reduce",
    1: "reduce",
    2: "all_gather",
    3: "gather",
    4: "scatter",
    5: "broadcast",
    6: "all_to_all",
    7: "reduce_scatter",
    8: "reduce_scatter",  # REDUCE_SCATTER_BLOCK
    9: "barrier",
}
"""``CollectiveCommType`` -> the operation's name in ``torch.distributed``."""

_MAX_MESSAGE: Final = 256_000_000
_MAX_VARINT: Final = 5
"""Bytes of a length; a longer one is damage."""

_PACKAGE: Final = "ChakraProtoMsg"
_TYPES: Final = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
_LENGTH_DELIMITED: Final = 2


@dataclass(frozen=True)
class Messages:
    """The message classes of the format."""

    metadata: Any
    node: Any


@functools.cache
def messages() -> Messages:
    """The message classes; the package ``protobuf`` must be installed."""
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pools: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    pool = pools.DescriptorPool()
    pool.Add(_schema(descriptors))

    def class_of(name: str) -> Any:
        return factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))

    return Messages(metadata=class_of("GlobalMetadata"), node=class_of("Node"))


def _schema(descriptors: Any) -> Any:
    file = descriptors.FileDescriptorProto(
        name="chakra_et_def.proto", package=_PACKAGE, syntax="proto3"
    )
    kinds = descriptors.FieldDescriptorProto

    def add(message: Any, name: str, number: int, kind: str, *, repeated: bool = False) -> Any:
        field = message.field.add(name=name, number=number)
        field.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        if kind in _TYPES:
            field.type = getattr(kinds, f"TYPE_{kind.upper()}")
        else:
            field.type = kinds.TYPE_ENUM if kind == "NodeType" else kinds.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{kind}"
        return field

    attribute = file.message_type.add(name="AttributeProto")
    add(attribute, "name", 1, "string")
    add(attribute, "doc_string", 2, "string")
    attribute.oneof_decl.add(name="value")
    for place, kind in enumerate(_TYPES):
        values = file.message_type.add(name=f"{kind.capitalize()}List")
        add(values, "values", 1, kind, repeated=True)
        add(attribute, f"{kind}_val", 3 + 2 * place, kind).oneof_index = 0
        add(attribute, f"{kind}_list", 4 + 2 * place, values.name).oneof_index = 0
    node_type = file.enum_type.add(name="NodeType")
    for number, name in enumerate(NODE_TYPES):
        node_type.value.add(name=name, number=number)
    metadata = file.message_type.add(name="GlobalMetadata")
    add(metadata, "version", 1, "string")
    add(metadata, "attr", 2, "AttributeProto", repeated=True)
    io_info = file.message_type.add(name="IOInfo")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        add(io_info, name, number, "string")
    node = file.message_type.add(name="Node")
    add(node, "id", 1, "uint64")
    add(node, "name", 2, "string")
    add(node, "type", 3, "NodeType")
    add(node, "ctrl_deps", 4, "uint64", repeated=True)
    add(node, "data_deps", 5, "uint64", repeated=True)
    add(node, "start_time_micros", 6, "uint64")
    add(node, "duration_micros", 7, "uint64")
    add(node, "inputs", 8, "IOInfo")
    add(node, "outputs", 9, "IOInfo")
    add(node, "attr", 10, "AttributeProto", repeated=True)
    return file


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a node or of the metadata: name -> value, a list where it is one."""
    found: dict[str, Any] = {}
    for each in message.attr:
        field = each.WhichOneof("value")
        if field is not None:
            value = getattr(each, field)
            found[each.name] = list(value.values) if field.endswith("_list") else value
    return found


class Frames:
    """Iterates over the encoded messages of a file.

    Attributes:
        damage: After the iteration: why messages are missing; None if none are.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.damage: str | None = None
        self._blocks = blocks

    def __iter__(self) -> Iterator[bytes]:
        buffer = bytearray()
        for block in self._blocks:
            buffer += block
            at = 0
            while (head := varint(buffer, at)) is not None:
                size, body = head
                if size > _MAX_MESSAGE:
                    self.damage = "a message has an impossible length: the rest is not read"
                    return
                if body + size > len(buffer):
                    break
                yield bytes(buffer[body : body + size])
                at = body + size
            del buffer[:at]
        if self._blocks.damage is not None:
            self.damage = self._blocks.damage
        elif buffer:
            self.damage = "the file ends inside a message"


def varint(data: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """The number that is encoded at a place, and the place behind it.

    None if the data end before the number does. A number that is longer than any length or tag
    is one that is larger than all of them.
    """
    value = 0
    for place in range(_MAX_VARINT):
        if at + place >= len(data):
            return None
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return _MAX_MESSAGE << 8, at + _MAX_VARINT


def begins_like_a_trace(head: bytes) -> bool:
    """Whether a file that begins so may be a sequence of these messages.

    The format has no mark of its own. The first message must hold nothing but a version and
    attributes, up to its end, and the next one must begin with the first field of a node.
    """
    first = varint(head, 0)
    if first is None:
        return False
    size, at = first
    end = at + size
    known = 0
    while at < min(end, len(head)):
        tag = head[at]
        length = varint(head, at + 1)
        if tag >> 3 not in (1, 2) or tag & 7 != _LENGTH_DELIMITED or length is None:
            return False
        body = length[1]
        at = body + length[0]
        if at > end or (tag >> 3 == 1 and not _is_version(head[body:at])):
            return False
        known += 1
    second = varint(head, end)
    if second is None or second[1] >= len(head):
        # Metadata alone, or so much that the head does not hold all of it.
        return known > 0
    # id (varint), name, or type: the first field of a node that is not zero.
    return 0 < second[0] < _MAX_MESSAGE and head[second[1]] in (0x08, 0x12, 0x18)


def _is_version(text: bytes) -> bool:
    return len(text) < 64 and all(0x20 < byte < 0x7F for byte in text)
