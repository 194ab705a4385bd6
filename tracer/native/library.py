"""The compiled C++ library: its functions, and the memory that it shares with Python."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.native.layout import TEXT

_MARKS: Final = {
    "marks_start": (None, 2),
    "marks_stop": (None, 0),
    "mark": (ctypes.c_int64, 1),
    "mark_keep": (None, 1),
    "mark_forget": (None, 1),
    "mark_interval": (ctypes.c_int64, 3),
    "mark_passed": (ctypes.c_int64, 3),
    "marks_abandon": (ctypes.c_int64, 0),
    "marks_gradients": (None, 1),
    "marks_end_gradient": (None, 1),
    "marks_state": (None, 1),
}
"""Result and number of arguments of each function of `device_marks.cpp` that keeps the interpreter
lock: it returns sooner than another thread could take it."""


class NativeLibrary:
    """The loaded library.

    Args:
        path: The file that `build.build` made.

    Attributes:
        control: The state of `gloo_messages.cpp`, laid out as `layout.CONTROL`.
        slots: The times of messages, each laid out as `layout.SLOT`.
        ring: The messages recorded in C++, each laid out as `layout.MESSAGE`. The first slots
            belong to them, in the same order.
        collectives: Number of collectives of each group for which C++ counts.
        gradient_control: The state of `gradients.cpp`, laid out as `layout.GRADIENT_CONTROL`.
        gradients: The gradients that became ready, each laid out as `layout.GRADIENT`, which is a
            row of `Recorder.flat`.
        marks: The functions of `device_marks.cpp`, by name without ``ddltrace_``.

    Raises:
        OSError: The library does not fit this PyTorch.
    """

    OFFERED: Final = 0
    NOTHING: Final = -1
    GATED: Final = "TESTING_ONLY_GenericMode"
    UNRECORDED: Final = -2  # the launch is offered, but not recorded

    def __init__(self, path: Path) -> None:
        # Calls keep the interpreter lock: memory that is only used under it needs no other lock.
        library = ctypes.PyDLL(str(path))
        try:
            self.begin_launch = _typed(library.ddltrace_begin_launch, ctypes.c_int, 2)
            self.end_launch = _typed(library.ddltrace_end_launch, None, 0)
            self._offered = library.ddltrace_offered
            self._offered.restype = ctypes.c_void_p
            self.see_launches = _typed(library.ddltrace_see_launches, ctypes.c_int, 0)
            self._gate = _typed(library.ddltrace_gate, ctypes.c_int, 0)
            self._gate.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64]
            self.gated = _typed(library.ddltrace_gated, ctypes.c_int64, 0)
            self.forget_groups = _typed(library.ddltrace_forget_groups, None, 0)
            self.add_counter = _typed(library.ddltrace_add_counter, ctypes.c_int64, 0)
            self.make_known = _typed(library.ddltrace_make_known, ctypes.c_int64, 2)
            self.activate = _typed(library.ddltrace_activate, None, 1)
            self.passing = _typed(library.ddltrace_passing, ctypes.c_int64, 0)
            self.forget = _typed(library.ddltrace_forget, None, 0)
            self.next_collective = _typed(library.ddltrace_next_collective, ctypes.c_int64, 1)
            self.watch_gradient = _typed(library.ddltrace_watch_gradient, ctypes.c_int, 3)
            self.marks = {
                name: _typed(getattr(library, f"ddltrace_{name}"), result, count)
                for name, (result, count) in _MARKS.items()
            }
            # Releases the interpreter lock: it asks for the time of many events.
            resolve = ctypes.CDLL(str(path)).ddltrace_marks_resolve
            self.marks["marks_resolve"] = _typed(resolve, ctypes.c_int64, 4)
            layout = _typed(library.ddltrace_layout, ctypes.c_char_p, 0)
            memory, gradient_memory = library.ddltrace_memory, library.ddltrace_gradient_memory
        except AttributeError as error:
            raise OSError(f"{path} is not the library that was built: {error}") from error
        if layout() != TEXT.encode():
            raise OSError(f"{path} was compiled from another layout.h")
        self.control, self.slots, self.ring, self.collectives = _pieces(memory, 4)
        self.gradient_control, self.gradients = _pieces(gradient_memory, 2)

    def gate(self, library: str, operator: str, *, is_collective: bool) -> bool:
        """Lets an operator call its kernel in Python only while something is recorded.

        Args:
            library: The operator's namespace.
            operator: Its name.
            is_collective: Whether it launches one collective, which is counted in any case.

        Returns:
            Whether this is possible. The kernel is registered at `GATED` before.
        """
        return bool(self._gate(library.encode(), operator.encode(), is_collective))

    def offered(self) -> memoryview:
        """The memory in which this thread offers its next launch and finds the launch time.

        Returns:
            Integers laid out as `layout.OFFER`. The first is `OFFERED`, `UNRECORDED` or `NOTHING`;
            after the launch, the time as a negative number.
        """
        length = ctypes.c_int64()
        return _integers_at(self._offered(ctypes.byref(length)), length.value)


def _pieces(function: Any, count: int) -> list[memoryview]:
    """The blocks of memory that a function of the library returns."""
    pieces, lengths = (ctypes.c_void_p * count)(), (ctypes.c_int64 * count)()
    function(pieces, lengths)
    return [_integers_at(piece, length) for piece, length in zip(pieces, lengths, strict=True)]


def _integers_at(address: Any, length: int) -> memoryview:
    return memoryview((ctypes.c_int64 * length).from_address(address)).cast("B").cast("q")


def _typed(function: Any, result: Any, num_integers: int) -> Any:
    function.restype = result
    function.argtypes = [ctypes.c_int64] * num_integers
    return function
