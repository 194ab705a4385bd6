"""Reads pickles of plain containers without executing code from them.

A pickle is a program. Two measures protect against a malicious one. First, all opcodes are checked:
an opcode that could name a class or call a function is rejected, as is a program that exceeds the
memory limit. Second, the unpickler cannot find any class.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ddltrace.analyzer.importers.memory_limit import check_memory, memory_limit
from ddltrace.tracer.errors import DdltraceError, TraceError
from ddltrace.tracer.storage.plain_files import open_given

IntArray = npt.NDArray[np.int64]

MAX_BYTES: Final = 256 << 20
MAGIC: Final = b"\x80"

_SLOT: Final = 16
"""Bytes of a place in the unpickler's stack, in a list or in the memo, which grow by doubling."""

# Opcode -> bytes of CPython's object that it makes, besides its place in the stack.
_FIXED: Final = {
    **dict.fromkeys(("STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE"), 0),
    **dict.fromkeys(("PROTO", "FRAME", "BININT1"), 0),
    **dict.fromkeys(("BININT", "BININT2", "BINFLOAT"), 32),
    **dict.fromkeys(("LIST", "EMPTY_LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), 80),
    **dict.fromkeys(("DICT", "EMPTY_DICT"), 80),
    **dict.fromkeys(("APPEND", "APPENDS", "EMPTY_TUPLE"), 0),
    # The table of a dictionary with one item, and each item more.
    "SETITEM": 160,
    "SETITEMS": 160,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _SLOT),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), 0),
}
_TEXT: Final = 64
"""Bytes of a short text, long number or bytes object besides its content."""

_VARIABLE: Final = frozenset(
    {"INT", "LONG", "LONG1", "LONG4", "FLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE"}
    | {"BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"}
    | {"BINBYTES8", "PUT", "GET"}
)
_PREFIX_BYTES: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_RUN_BYTES: Final = 1 << 18
_LONG_BINPUT: Final = ord("r")


class _Unpickler(pickle.Unpickler):
    """An unpickler that rejects every class and function."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name[:60]}.{global_name[:60]}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it asks for an object outside the file")


def load(path: Path) -> Any:
    """Reads a pickle of numbers, text, lists, tuples and dictionaries.

    Containers may be shared or contain themselves, so callers must bound their traversal.

    Raises:
        TraceError: It is too large, damaged, needs more memory than its limit, or holds or asks
            for anything else.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TraceError(f"{path} is larger than {MAX_BYTES >> 20} MB: no dump is that large")
        with open_given(path) as file:
            content = file.read()
        limit = memory_limit(len(content))
        check_memory(path, _needed_bytes(content, limit), len(content))
        return _Unpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        if isinstance(error, DdltraceError):
            raise
        reason = " ".join(str(error).split())
        raise TraceError(f"{path} is not a pickle of plain containers: {reason:.120}") from error


_OPCODES: Final = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_LENGTHS: Final = np.zeros(256, np.int64)
_COSTS: Final = np.zeros(256, np.int64)
for _code, _opcode in _OPCODES.items():
    if _opcode.name in _FIXED:
        _LENGTHS[_code] = 1 + (0 if _opcode.arg is None else _opcode.arg.n)
        _COSTS[_code] = _SLOT + _FIXED[_opcode.name]


def _fixed_pattern(repeat: bytes) -> bytes:
    """A pattern for opcodes of fixed length; `repeat` applies to those without an argument."""
    codes = np.flatnonzero(_LENGTHS)
    branches = []
    for length in sorted(set(_LENGTHS[codes].tolist())):
        those = re.escape(bytes(codes[_LENGTHS[codes] == length].tolist()))
        rest = b"[\\s\\S]{%d}" % (length - 1) if length > 1 else repeat
        branches.append(b"[%s]%s" % (those, rest))
    return b"(?:%s)" % b"|".join(branches)


_FIXED_OPCODE: Final = re.compile(_fixed_pattern(b""))
_RUN: Final = re.compile(_fixed_pattern(b"+") + b"+")


def _needed_bytes(content: bytes, limit: int) -> int:
    """An estimate of the memory that a pickle's objects take; it ends when `limit` is exceeded.

    Opcodes of fixed length are counted a run at a time: to read them one at a time takes ten
    times as long.

    Raises:
        pickle.UnpicklingError: It holds an opcode that is not for plain containers, or claims
            memory for a memo that it cannot fill.
    """
    needed, opcodes, place = len(content), 0, 0
    while place < len(content) and needed <= limit:
        run = _RUN.match(content, place, place + _RUN_BYTES)
        if run is None:
            opcode = _OPCODES.get(content[place])
            if opcode is None or opcode.name not in _VARIABLE:
                name = "an unknown opcode" if opcode is None else opcode.name
                if opcode is not None and opcode.name in _FIXED:
                    break  # its argument is cut off: the unpickler says so
                raise pickle.UnpicklingError(f"it holds more than that ({name})")
            end = _end_of(content, place, opcode)
            if opcode.name == "PUT":
                _check_memo(np.array([int(content[place + 1 : end])]), np.array([opcodes]))
            opcodes += 1
            needed += _SLOT + _TEXT + 2 * (end - place)
            place = end
        else:
            text = np.frombuffer(run.group(), np.uint8)
            found = _FIXED_OPCODE.findall(run.group())
            lengths = np.fromiter(map(len, found), np.int64, len(found))
            starts = np.cumsum(lengths) - lengths
            codes = text[starts]
            writes = np.flatnonzero(codes == _LONG_BINPUT)
            # Four bytes, the lowest first.
            numbers = text[starts[writes][:, None] + np.arange(1, 5)].astype(np.int64)
            _check_memo(numbers @ (256 ** np.arange(4)), opcodes + writes)
            needed += int(_COSTS[codes].sum())
            opcodes += len(codes)
            place = run.end()
    return needed


def _end_of(content: bytes, place: int, opcode: pickletools.OpcodeInfo) -> int:
    """Where an opcode of variable length ends."""
    assert opcode.arg is not None
    size = _PREFIX_BYTES.get(opcode.arg.n)
    if size is None:
        line_end = content.find(b"\n", place)
        return line_end + 1 if line_end >= 0 else len(content)
    begin = place + 1 + size
    return begin + int.from_bytes(content[place + 1 : begin], "little")


def _check_memo(numbers: IntArray, opcodes: IntArray) -> None:
    """Checks numbers written to the memo: the unpickler makes room for all numbers below.

    Args:
        opcodes: How many opcodes stand before each.
    """
    if (numbers > opcodes).any():
        raise pickle.UnpicklingError("it claims more memory than it can use")
