"""Writes `docs/api-reference.md` from signatures and docstrings: `python3 dev.py docs`."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ddltrace
from ddltrace.analyzer.model import Analysis
from ddltrace.analyzer.open_trace import Trace
from ddltrace.tracer import errors

PAGE = Path(__file__).with_name("api-reference.md")

INTRODUCTION = """\
# Reference of the Python API

Written by `python3 dev.py docs` from the signatures and docstrings; a test fails when the two
differ. [python-api.md](python-api.md) shows the API on examples. Names that end in `_ns` are
nanoseconds, in `_us` microseconds; shares are between 0 and 1. What is not listed here may change.
"""

OF_TRACE: Final = (
    *("events", "counters", "has_counters", "tensors", "tensor_names"),
    *("group_ranks", "group_size", "group_backend", "group_description"),
    *("infos", "clocks", "origin_ns", "moment", "within", "of_rank", "of_steps", "analyze"),
)
OF_ANALYSIS: Final = (
    *("to_json", "ranks_frame", "steps_frame", "rank_steps_frame"),
    *("collectives_frame", "tensors_frame", "stragglers_frame"),
)
ERRORS: Final = ("DdltraceError", "TraceError", "UsageError", "MissingCapabilityError")

_SECTION: Final = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):\n", re.MULTILINE)
_TITLES: Final = {"Args": "Arguments"}


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION, "## Functions\n"]
    parts += [
        described(f"ddltrace.{name}", getattr(ddltrace, name)) for name in ("open", "annotate")
    ]
    parts += ["## `Trace`\n", text_of(Trace)]
    parts += [described(f"Trace.{name}", inspect.getattr_static(Trace, name)) for name in OF_TRACE]
    parts.append(
        "## `Analysis`\n\nThe result of `Trace.analyze`. Its attributes are the keys of "
        "[report-reference.md](report-reference.md); `collectives_frame` has the rows of\n"
        "`collectives[]`, and so on. The frames need pandas (`pip install 'ddltrace[frames]'`),\n"
        "else they raise `MissingCapabilityError`.\n"
    )
    parts += [described(f"Analysis.{name}", getattr(Analysis, name)) for name in OF_ANALYSIS]
    parts.append("## Errors\n\nOf `ddltrace.tracer.errors`; each message is one line.\n")
    for name in ERRORS:
        kind = getattr(errors, name)
        parts.append(f"- `{name}({kind.__base__.__name__})`: {summary(kind)}")
    return "\n".join(parts) + "\n"


def described(name: str, member: Any) -> str:
    """A function, method or property with its signature and docstring."""
    function = getattr(member, "func", None) or getattr(member, "fget", None)
    if function is not None:  # a property, cached or not
        returned = inspect.signature(function).return_annotation
        return f"### `{name}: {returned}`\n\n{text_of(function)}"
    signature = str(inspect.signature(member)).replace("'", "")
    signature = signature.replace("(self, ", "(").replace("(self)", "()")
    signature = re.sub(r"self: \w+, ", "", signature).replace("-> TraceT", "-> Trace")
    return f"### `{name}{signature}`\n\n{text_of(member)}"


def text_of(member: Any) -> str:
    """A docstring as Markdown."""
    first, *rest = _SECTION.split(inspect.getdoc(member) or "")
    lines = [paragraphs(first)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        lines.append(f"{_TITLES.get(title, title)}:\n")
        if title in ("Returns", "Yields"):
            lines.append(paragraphs(inspect.cleandoc(body)))
        else:
            lines += [*listed(body), ""]
    return "\n".join(lines)


def listed(body: str) -> Iterator[str]:
    """The entries of a section as a list."""
    for entry in re.split(r"\n(?=    \w)", "\n" + body.rstrip()):
        name, colon, meaning = " ".join(entry.split()).partition(": ")
        if colon:
            name = name.rpartition(".")[2]
            yield f"- `{name}`: {meaning}".replace("``", "`")


def paragraphs(text: str) -> str:
    """Text with Markdown's code spans."""
    return text.strip().replace("``", "`") + "\n"


def summary(member: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(member) or "").partition("\n\n")[0].replace("``", "`")


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
