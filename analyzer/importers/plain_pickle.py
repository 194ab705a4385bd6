"""Pickles of plain containers, read without ever running what they could ask for.

A pickle is a program. Two walls stand against a hostile one: its opcodes are read beforehand,
and any that could name a class, call something or claim memory is refused; and the unpickler
that then runs can find no class at all.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import TraceError

MAX_BYTES: Final = 256 << 20
MAGIC: Final = b"\x80"

_ALLOWED: Final = frozenset(
    {"PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"}
    | {"INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING"}
    | {"SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
    | {"EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"}
    | {"TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"}
    | {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET"}
)
_MEMO_WRITES: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds nothing."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name[:60]}.{global_name[:60]}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it asks for an object outside the file")


def load(path: Path) -> Any:
    """Reads a pickle of numbers, text, lists, tuples and dictionaries.

    Raises:
        TraceError: It is too large, damaged, or holds or asks for anything else.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TraceError(f"{path} is larger than {MAX_BYTES >> 20} MB: no dump is that large")
        content = path.read_bytes()
        _check(content)
        return _Unpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:
        if isinstance(error, TraceError):
            raise
        reason = " ".join(str(error).split())
        raise TraceError(f"{path} is no pickle of plain containers: {reason:.120}") from error


def _check(content: bytes) -> None:
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in _ALLOWED:
            raise pickle.UnpicklingError(f"it holds more than that ({opcode.name})")
        # The unpickler makes room for a memo as large as the largest number written to it.
        if opcode.name in _MEMO_WRITES and int(argument or 0) > number:
            raise pickle.UnpicklingError("it claims more memory than it can use")
