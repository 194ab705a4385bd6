"""The library that is compiled of the sources here: its functions, and the memory it shares."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final


class NativeLibrary:
    """What `build.build` made, loaded.

    Args:
        path: Where it lies.

    Attributes:
        control: Six integers; see `Control` in `gloo_messages.cpp`.
        slots: The times of messages, `SLOT_FIELDS` integers each; see `Slot`.
        ring: What C++ has recorded of messages, `RING_FIELDS` integers each; see `Message`. The
            first slots are theirs, in the same order.
        collectives: Of each group that C++ counts for: how many collectives it has had.
        gradient_control: Four integers; see `Control` in `gradients.cpp`.
        gradients: What became ready, a row of `Recorder.flat` each; see there.

    Raises:
        OSError: It does not fit this PyTorch.
    """

    SLOT_FIELDS: Final = 4
    RING_FIELDS: Final = 8
    OFFERED: Final = 0
    NOTHING: Final = -1
    UNRECORDED: Final = -2  # the launch is offered, but is to pass by as if untraced

    def __init__(self, path: Path) -> None:
        # The interpreter stays ours during a call: what is only read and written under it is safe.
        library = ctypes.PyDLL(str(path))
        try:
            self.begin_launch = _typed(library.ddltrace_begin_launch, ctypes.c_int, 2)
            self.end_launch = _typed(library.ddltrace_end_launch, None, 0)
            self._offered = library.ddltrace_offered
            self._offered.restype = ctypes.c_void_p
            self.see_launches = _typed(library.ddltrace_see_launches, ctypes.c_int, 0)
            self.make_known = _typed(library.ddltrace_make_known, ctypes.c_int64, 2)
            self.activate = _typed(library.ddltrace_activate, None, 1)
            self.passing = _typed(library.ddltrace_passing, ctypes.c_int64, 0)
            self.forget = _typed(library.ddltrace_forget, None, 0)
            self.next_collective = _typed(library.ddltrace_next_collective, ctypes.c_int64, 1)
            self.watch_gradient = _typed(library.ddltrace_watch_gradient, ctypes.c_int, 2)
            memory, gradient_memory = library.ddltrace_memory, library.ddltrace_gradient_memory
        except AttributeError as error:
            raise OSError(f"{path} is not what was built: {error}") from error
        self.control, self.slots, self.ring, self.collectives = _pieces(memory, 4)
        self.gradient_control, self.gradients = _pieces(gradient_memory, 2)

    def offered(self) -> memoryview:
        """Where this thread says what it launches next, and what is then known of it.

        Returns:
            Seven integers; see `Offer` in `gloo_messages.cpp`. The first is `OFFERED`, `UNRECORDED`
            or `NOTHING`; once launched, the time as a negative number.
        """
        length = ctypes.c_int64()
        return _integers_at(self._offered(ctypes.byref(length)), length.value)


def _pieces(function: Any, count: int) -> list[memoryview]:
    """The pieces of memory that a function of the library tells of."""
    pieces, lengths = (ctypes.c_void_p * count)(), (ctypes.c_int64 * count)()
    function(pieces, lengths)
    return [_integers_at(piece, length) for piece, length in zip(pieces, lengths, strict=True)]


def _integers_at(address: Any, length: int) -> memoryview:
    return memoryview((ctypes.c_int64 * length).from_address(address)).cast("B").cast("q")


def _typed(function: Any, result: Any, num_integers: int) -> Any:
    function.restype = result
    function.argtypes = [ctypes.c_int64] * num_integers
    return function
