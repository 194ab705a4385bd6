"""Names files that are not read, by their content, and how to get something readable.

Each entry is recognized by what the program that writes it puts at the file's start. Nsight
Systems' report has no published mark; it and a few others fall back to the end of their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from ddltrace.analyzer.importers.blocks import Blocks
from ddltrace.analyzer.importers.chakra.messages import varint
from ddltrace.tracer.errors import TraceError

HEAD_BYTES: Final = 1 << 18

_KINETO: Final = "trace the same steps with torch.profiler, and read what it exports"
_NSYS: Final = (
    "it is read by nsys only. For ddltrace, record the job with ddltrace run, or its steps with "
    "torch.profiler"
)
_FOLDER: Final = "give the folder that it is in"


def _has(*marks: bytes) -> Callable[[bytes], bool]:
    """Recognizes a head that contains all of some marks."""
    return lambda head: all(mark in head for mark in marks)


def _matches(pattern: bytes) -> Callable[[bytes], bool]:
    """Recognizes a head that begins with a pattern."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda head: compiled.match(head) is not None


def _begins(mark: bytes, *others: bytes) -> Callable[[bytes], bool]:
    """Recognizes a head that begins with a mark and contains others."""
    return lambda head: head.startswith(mark) and all(other in head for other in others)


def _is_perfetto(head: bytes) -> bool:
    """Whether the head is a sequence of Perfetto's packets, field 1 of the message `Trace`.

    A packet has no mark: the fields of the first ones must be fields that packets have, a
    timestamp (8), a sequence (10) or a clock snapshot (6) among them.
    """
    at, packets, known = 0, 0, False
    while packets < 8 and at < len(head) and head[at] == 0x0A:
        size = varint(head, at + 1)
        if size is None:
            break
        start, at = size[1], size[1] + size[0]
        tag = varint(head, start)
        if size[0] and (tag is None or not 1 <= tag[0] >> 3 < 1000 or tag[0] & 7 not in (0, 1, 2)):
            return False
        packets += 1
        known = known or re.search(rb"[\x40\x50]|\x32.\x0a", head[start:at], re.DOTALL) is not None
    return known and (packets >= 2 or at == len(head))


# What it is, how it is recognized, and how to get something readable. The first that holds counts.
_Kind: TypeAlias = tuple[str, Callable[[bytes], bool], str]

_MISTAKABLE: Final[tuple[_Kind, ...]] = (
    (
        "a PyTorch memory snapshot (a pickle of torch.cuda.memory)",
        lambda head: (
            head.startswith(b"\x80")
            and b"segments" in head[:4096]
            and (b"device_traces" in head or b"total_size" in head)
        ),
        f"it holds allocations: open it at pytorch.org/memory_viz. For times, {_KINETO}",
    ),
    (
        "a PyTorch execution trace (of ExecutionTraceObserver)",
        lambda head: (
            re.search(rb"\[pytorch\|profiler\|execution_(?:trace|graph)\|", head) is not None
            or (re.match(rb'\s*\{\s*"schema"', head) is not None and b'"ctrl_deps"' in head)
        ),
        f"it holds operators and no times: {_KINETO}",
    ),
    (
        "a checkpoint of PyTorch (torch.save)",
        lambda head: (
            (head.startswith(b"PK\x03\x04") and b"/data.pkl" in head[:4096])
            or b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19" in head[:64]
        ),
        f"it holds tensors: {_KINETO}",
    ),
    (
        "a profile of XLA or JAX (.xplane.pb)",
        lambda head: (
            re.match(rb"\x0a.{1,5}?(?:\x08.{1,9}?)?\x12.(?:/|Task )", head, re.DOTALL) is not None
        ),
        "it is read by XProf and TensorBoard. ddltrace reads traces of PyTorch",
    ),
    (
        "a trace of Perfetto (.pftrace)",
        _is_perfetto,
        "ddltrace writes this format and does not read it: give the trace that it was exported "
        "from, or convert it to Chrome JSON with Perfetto's traceconv json",
    ),
)
"""Files that a reader of another format would take for its own."""

_KINDS: Final[tuple[_Kind, ...]] = (
    *_MISTAKABLE,
    (
        "a TensorBoard event file",
        lambda head: b"brain.Event:" in head[:64],
        f"it holds scalars and images: {_KINETO}",
    ),
    (
        "a report of NVIDIA Nsight Compute (.ncu-rep)",
        _begins(b"NVR\0"),
        f"it holds counters of single kernels: open it with ncu-ui. For times, {_KINETO}",
    ),
    (
        "an SQLite database that Nsight Systems exported",
        lambda head: (
            head.startswith(b"SQLite format 3\0")
            and re.search(rb"CUPTI_ACTIVITY_KIND|TARGET_INFO_|NVTX_EVENTS|StringIds", head)
            is not None
        ),
        _NSYS,
    ),
    ("an SQLite database", _begins(b"SQLite format 3\0"), f"it is not a trace: {_KINETO}"),
    (
        "a report of NVIDIA Nsight Systems (.nsys-rep, .qdrep)",
        lambda head: re.search(rb"QuadD|Nsight Systems", head[:4096]) is not None,
        _NSYS,
    ),
    (
        "a file of safetensors",
        _matches(rb'.{5}\0\0\0\{\s*"'),
        f"it holds tensors: {_KINETO}",
    ),
    (
        "a profile of speedscope (py-spy, pprof)",
        _has(b"speedscope.app/file-format-schema"),
        f"it holds samples of stacks: open it at speedscope.app. For times, {_KINETO}",
    ),
    (
        "a flame graph as an SVG image",
        lambda head: b"<svg" in head[:1024] and b"flame" in head.lower()[:65536],
        f"it holds samples of stacks: open it in a browser. For times, {_KINETO}",
    ),
    (
        "a profile of Python's cProfile",
        _matches(rb"[{\xfb][)\xa9]\x03[zZaAut\xfa\xda\xe1\xc1\xf5\xf4]"),
        f"it holds sums over functions: read it with python -m pstats. For times, {_KINETO}",
    ),
    (
        "a core dump",
        lambda head: head.startswith(b"\x7fELF") and head[16:18] in (b"\4\0", b"\0\4"),
        "read it with gdb: it is the memory of a process that crashed",
    ),
    ("a program or library (ELF)", _begins(b"\x7fELF"), "it is not a trace"),
    ("a recording of Linux perf", _begins(b"PERFILE2"), f"read it with perf. For times, {_KINETO}"),
    (
        "a trace of Windows' event tracing (.etl)",
        _has("Microsoft Windows".encode("utf-16-le")),
        f"read it with Windows Performance Analyzer. For times, {_KINETO}",
    ),
    (
        "the results of an experiment of ddltrace",
        lambda head: re.search(rb'"schema"\s*:\s*"ddltrace\.experiment/', head[:512]) is not None,
        f"{_FOLDER} to ddltrace dashboard or ddltrace experiment compare",
    ),
    (
        "the record of a trace (run.json)",
        lambda head: re.search(rb'"schema"\s*:\s*"ddltrace\.trace/', head[:512]) is not None,
        _FOLDER,
    ),
    (
        "an analysis (the output of ddltrace analyze --json)",
        lambda head: re.search(rb'"schema"\s*:\s*"ddltrace\.analysis/', head[:512]) is not None,
        "give the trace that was analyzed",
    ),
    (
        "an HTML report of ddltrace",
        lambda head: b"- ddltrace</title>" in head[:4096],
        "open it in a browser, or give the trace that it is of",
    ),
    ("a page of HTML", _matches(rb"\s*(?i:<!doctype html|<html)"), "it is not a trace"),
    ("an Arrow file", _begins(b"ARROW1"), f"if it is part of a trace of ddltrace, {_FOLDER}"),
    ("a Parquet file", _begins(b"PAR1"), "of these, files of StragglerAnalysis can be read"),
    ("compressed by zstd", _begins(b"\x28\xb5\x2f\xfd"), "decompress it with zstd -d"),
    ("compressed by xz", _begins(b"\xfd7zXZ\0"), "decompress it with xz -d"),
    ("compressed by bzip2", _matches(rb"BZh[1-9]1AY&SY"), "decompress it with bzip2 -d"),
    ("a zip archive", _begins(b"PK\x03\x04"), "unpack it, and give the folder"),
    (
        "a tar archive",
        lambda head: head[257:262] == b"ustar",
        "unpack it, and give the folder",
    ),
    (
        "a log of NCCL (NCCL_DEBUG)",
        _has(b" NCCL INFO "),
        f"it has no times of operations: {_KINETO}",
    ),
)

# Formats without a mark that is known, by the ends of names.
_NAMES: Final = {
    ".nsys-rep": ("a report of NVIDIA Nsight Systems", _NSYS),
    ".qdrep": ("a report of NVIDIA Nsight Systems", _NSYS),
    ".etl": ("a trace of Windows' event tracing", f"read it with its own tools. {_KINETO}"),
    ".pickle": ("a pickle, perhaps a memory snapshot of PyTorch", _KINETO),
    ".pkl": ("a pickle, perhaps a memory snapshot of PyTorch", _KINETO),
}


def is_mistakable(head: bytes) -> bool:
    """Whether a file is of a kind that is not read although a reader would recognize it."""
    return any(recognizes(head) for _, recognizes, _ in _MISTAKABLE)


def kind_of_head(head: bytes) -> str | None:
    """Describes a file that is not read by its first bytes; None if they are of no known kind."""
    for what, recognizes, fix in _KINDS:
        if recognizes(head):
            return f"{what}, which is not read: {fix}"
    return None


def kind_of_file(file: Path) -> str | None:
    """Describes a file that is not read; None if nothing is known of it."""
    if file.is_file() and file.stat().st_size == 0:
        return "empty"
    try:
        found = kind_of_head(Blocks(file).head(HEAD_BYTES))
    except TraceError:
        return None
    if found is None and (by_name := _NAMES.get(file.suffix.lower())):
        return f"by its name {by_name[0]}, which is not read: {by_name[1]}"
    return found
