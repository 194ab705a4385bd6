"""The helper process of an import: reads requested files and returns their contents.

Imports little, so that a helper starts quickly.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, Final

from ddltrace.tracer.errors import TraceError

_ALIGNMENT: Final = 64


def serve(module: str, function: str) -> None:
    """Reads the files named on stdin with a function, until stdin ends."""
    # The parent process handles interrupts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    read = getattr(importlib.import_module(module), function)
    pickle.dump("ready", answers)
    answers.flush()
    while True:
        try:
            path, file = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[str | None, bytes, list[tuple[int, int]]]
        try:
            answer = None, *_hand_over(read(Path(path)), Path(file))
        except TraceError as error:
            answer = str(error), b"", []
        pickle.dump(answer, answers)
        answers.flush()


def _hand_over(result: Any, file: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """Writes the memory of a result's columns to a file.

    Returns:
        The result without that memory, and where in the file each piece of it begins, with
        its size.
    """
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
    places = []
    with open(file, "wb") as out:
        out.write(bytes(_ALIGNMENT))  # a file without content cannot be mapped
        for buffer in buffers:
            out.write(bytes(-out.tell() % _ALIGNMENT))
            places.append((out.tell(), out.write(buffer)))
    return content, places
