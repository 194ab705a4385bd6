"""Translates other tools' names of operations, element types and groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from ddltrace.tracer.trace.schema import OPS

# In the order in which they are looked for: a name inside another one comes after it.
_OPS: Final = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("allall", "all_to_all"),  # All2All
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("sendrecv", "send_recv"),
    ("recv", "recv"),
    ("send", "send"),
)
_NOISE: Final = re.compile(r"[^a-z]")

_DTYPES: Final = {
    "float": ("float32", 4),
    "float32": ("float32", 4),
    "double": ("float64", 8),
    "float64": ("float64", 8),
    "half": ("float16", 2),
    "c10::half": ("float16", 2),
    "float16": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "c10::bfloat16": ("bfloat16", 2),
    "int": ("int32", 4),
    "int32": ("int32", 4),
    "uint32": ("uint32", 4),
    "unsigned int": ("uint32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "int64": ("int64", 8),
    "uint64": ("uint64", 8),
    "unsigned long": ("uint64", 8),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int16": ("int16", 2),
    "uint16": ("uint16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "int8": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "uint8": ("uint8", 1),
    "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "c10::float8_e5m2": ("float8_e5m2", 1),
    "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16),
}

MAX_COUNT: Final = 1 << 62
MAX_INT32: Final = (1 << 31) - 1
_MAX_DIMENSIONS: Final = 64
"""Maximum number of elements of a PyTorch tensor."""


def public_op(name: str) -> str | None:
    """The name in ``torch.distributed`` of an operation in another library's spelling.

    Args:
        name: A name such as ``nccl:all_reduce``, ``_allgather_base_``, ``AllReduce``, or that of a
            kernel.

    Returns:
        One of `OPS`, or ``send_recv`` for a kernel that may be several of them; None if the
        name is of no known operation.
    """
    plain = _NOISE.sub("", name.lower())
    return next((op for word, op in _OPS if word in plain), None)


def is_known(op: str) -> bool:
    """Whether an operation is one of `torch.distributed`'s."""
    return op in OPS


def element_type(name: Any) -> tuple[str | None, int | None]:
    """Name of an element type as in ``torch``, and its bytes; None where unknown."""
    if not isinstance(name, str) or not name:
        return None, None
    return _DTYPES.get(name.lower(), (name.lower(), None))


def count(value: Any, most: int = MAX_COUNT - 1) -> int | None:
    """A count or a number of bytes, at most `most`; None for any other value."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= most:
        return value
    return None


def size_of(elements: Any, width: int | None) -> int | None:
    """Bytes of a number of elements."""
    number = count(elements)
    return None if number is None or width is None else count(number * width)


def elements_of(shape: Any) -> int | None:
    """Elements of a shape, or of a list of shapes summed; None if it is neither."""
    if not isinstance(shape, (list, tuple)):
        return None
    if shape and all(isinstance(entry, (list, tuple)) for entry in shape):
        parts = [_product(entry) for entry in shape[:65536]]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None
    return _product(shape)


def _product(lengths: Sequence[Any]) -> int | None:
    """Elements of one shape; None if it holds anything but lengths, or more than a tensor's."""
    if len(lengths) > _MAX_DIMENSIONS:
        return None
    product = 1
    for length in lengths:
        if type(length) is not int or length < 0:
            return None
        product *= length
        if product >= MAX_COUNT:
            return None
    return product


def members(value: Any) -> tuple[int, ...]:
    """Numbers, as the ranks of a group, from a list or its text; empty if it is incomplete."""
    if isinstance(value, str):
        if not re.fullmatch(r"\s*\[?\s*\d{1,9}(\s*,\s*\d{1,9})*\s*\]?\s*", value):
            return ()
        value = [int(number) for number in re.findall(r"\d+", value)]
    if not isinstance(value, list) or any(type(rank) is not int or rank < 0 for rank in value):
        return ()
    return tuple(value)
