"""Reads several files in parallel, in this process and in helper processes.

Decoding JSON holds the interpreter lock, so threads would gain nothing. Helpers are plain
subprocesses: those of multiprocessing run the caller's script again, which a script without a
main guard does not survive. What a helper read comes back through a file that is mapped into
memory, so that columns are neither copied nor sent through a pipe.
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from ddltrace.tracer.errors import TraceError

_MAX_PROCESSES: Final = 16
"""Each holds the events of one file: this bounds memory on machines with many cores."""

_COMPRESSED: Final = ".gz"
_USUAL_COMPRESSION: Final = 15
_PROGRAM: Final = """
import sys
sys.path[:] = {path!r}
from {package}.decode_worker import serve
serve({module!r}, {function!r})
"""

_Read = TypeVar("_Read")
_Result = TypeVar("_Result")


class _HelperGoneError(Exception):
    """A helper ended, or could not return its result."""


def read_side_by_side(
    paths: Sequence[Path],
    read: Callable[[Path], _Read],
    finish: Callable[[Path, _Read], _Result],
    worthwhile_bytes: int,
) -> list[_Result]:
    """Reads files on the available cores; small files are read in this process.

    Args:
        paths: The files.
        read: Reads one; a function of a module, so that a helper can find it.
        finish: Creates the result from a file and its decoded content, in this process.
        worthwhile_bytes: Minimum size of the text for which helpers are started.

    Returns:
        One result per file, in their order. A file whose helper died is read here.

    Raises:
        TraceError: `read` raised it; the error is that of the first such file.
    """
    helpers = min(len(paths), len(os.sched_getaffinity(0)), _MAX_PROCESSES) - 1
    if helpers < 1 or text_bytes(paths) < worthwhile_bytes:
        return [finish(path, read(path)) for path in paths]
    results: dict[int, _Result] = {}
    failures: dict[int, TraceError] = {}

    def take(number: int, found: Callable[[Path], _Read]) -> None:
        try:
            results[number] = finish(paths[number], found(paths[number]))
        except TraceError as error:
            failures[number] = error
        except _HelperGoneError:
            take(number, read)

    with (
        TemporaryDirectory(prefix="ddltrace-") as folder,
        _Helpers(read, Path(folder), helpers) as others,
    ):
        asked = [others.ask(path) for path in paths]
        # Files that no helper has started, from the end; then the results of the helpers.
        for number in reversed(range(len(paths))):
            if asked[number].cancel():
                take(number, read)
        for number, answer in enumerate(asked):
            if not answer.cancelled():
                take(number, partial(_answered, answer))
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in range(len(paths))]


def _answered(answer: Future[_Read], _: Path) -> _Read:
    return answer.result()


def text_bytes(paths: Sequence[Path]) -> int:
    """Approximate size of the text in files, estimated from their sizes."""
    return sum(map(_text_bytes, paths))


def _text_bytes(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError:
        return 0
    return size * _USUAL_COMPRESSION if path.suffix == _COMPRESSED else size


class _Helpers:
    """Helpers that take one file after the other, for the time of a `with` block."""

    def __init__(self, read: Callable[[Path], Any], folder: Path, count: int) -> None:
        self._function = read
        self._folder = folder
        self._all: list[_Helper] = []
        self._closed = False
        self._of_thread = threading.local()
        # One thread for each helper, which takes its first file when the helper is ready; until
        # then, this process reads files.
        self._threads = ThreadPoolExecutor(count, initializer=self._start)

    def ask(self, path: Path) -> Future[Any]:
        """The future result of a file in one of the helpers; fails with `_HelperGoneError` if it
        dies."""
        return self._threads.submit(self._read, path)

    def _start(self) -> None:
        with suppress(OSError, _HelperGoneError):  # too little memory: continue without this helper
            self._of_thread.helper = helper = _Helper(self._folder, self._function)
            self._all.append(helper)
            if self._closed:
                helper.kill()
            helper.wait_until_ready()

    def _read(self, path: Path) -> Any:
        helper = getattr(self._of_thread, "helper", None)
        if helper is None:
            raise _HelperGoneError
        return helper.read(path)

    def __enter__(self) -> _Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Threads that wait for a helper's answer wait until the helper has ended.
        for helper in self._all:
            helper.kill()
        self._threads.shutdown()


class _Helper:
    """A process that reads one file after the other."""

    def __init__(self, folder: Path, read: Callable[[Path], Any]) -> None:
        program = _PROGRAM.format(
            path=sys.path, package=__package__, module=read.__module__, function=read.__qualname__
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._file = folder / str(self._process.pid)

    def wait_until_ready(self) -> None:
        """Returns when the process has imported what it needs."""
        self._answer()

    def read(self, path: Path) -> Any:
        """What the function returns for a file."""
        assert self._process.stdin is not None
        try:
            pickle.dump((os.fspath(path), os.fspath(self._file)), self._process.stdin)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # its pipe is broken, or closed here
            raise _HelperGoneError from error
        failure, content, places = self._answer()
        if failure is not None:
            raise TraceError(failure)
        return pickle.loads(content, buffers=_mapped(self._file, places))

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise _HelperGoneError from error

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _mapped(file: Path, places: list[tuple[int, int]]) -> list[memoryview]:
    with open(file, "rb") as opened:
        content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    file.unlink()  # the mapping stays
    return [content[begin : begin + size] for begin, size in places]
