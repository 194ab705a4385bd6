"""Writes `docs/report-reference.md` from the records of the analysis: `python3 dev.py docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ddltrace.analyzer import model
from ddltrace.analyzer.compare import comparison

PAGE = Path(__file__).with_name("report-reference.md")

INTRODUCTION = """\
# What the JSON holds

Written by `python3 dev.py docs` from the records that hold it; a test fails when the two differ.

Times are microseconds (`_us`), shares are fractions from 0 to 1, bandwidths are gigabits per
second (`_gbps`). What the trace cannot give is null, never zero. Keys may be added; those that
are here keep their meaning as long as `schema` stays the same. In Python the same records are
the attributes of `Analysis`, see [python-api.md](python-api.md).
"""

TERMS = """\
# Times and counts

The measures below are made of the terms of this section, which are defined by the rows and columns
of a trace ([trace-format.md](trace-format.md)). `tests/unit/analyzer/test_stranger.py` is a reader
that was written from the two pages alone and gets the same numbers.

**Rows.** The rows of a rank are those of all its files. Of the rows of kind `message` with the same
`id` in one file, only the last one counts. A row without `end_ns` takes no time. If `run.json`
names one `clock_domain` for all ranks, times of different ranks can be compared as they are;
otherwise add to those of a rank the `offset_us` (at its first event) and `drift_ppm` of
`clock.ranks[]`.

**Sums of times.** A time such as *compute* is a set of instants: the union of intervals from
`start_ns` to `end_ns`. Its length counts an instant once, however many intervals contain it. A
percentile interpolates linearly between the two nearest values.

A term of this list means instants of one rank, those:

- *compute*: in a row of kind `kernel`, if the rank has one. Else: for each `lane`, in a row
  of kind `phase` called `forward`, `backward` or `optimizer`, or of kind `layer` or `codec`, and
  not blocked in a wait of the same lane; then the union over lanes
- *blocked*: in a wait: from `start_ns` to `end_ns` of a row of kind `wait`. A wait called
  `backward` without `parent` ends when its last message has completed, no later than at its
  `end_ns`, and takes no time if it has no message. Its messages are those whose `enqueue_ns` (else
  `start_ns`) lies between the start of the `backward` phase in which it begins and its `end_ns`
- *communication*: in a row of kind `message`. If any message of the rank has a lane that begins
  with `stream`, only those with such lanes count, here and for waiting and transfer
- *copies*: in a row of kind `copy`
- *data loading*: in a row of kind `data`
- *update*: in a row of kind `phase` called `optimizer`
- *device work*: in compute, communication or copies
- *overlap*: in compute and in communication
- *exposed communication*: in communication, and not in compute
- *idle*: in a step, or between the first start and the last end of the rank's device work, and not
  in device work
- *waiting*: between the start and the release of some message, and in no transfer, nor in a message
  whose release is unknown
- *transfer*: between the release and the end of some message

Compute, data loading and update do not contain the times in which the process was stopped
(`resources[].stops`).

**Steps.** A rank's step is its row of kind `step` with an `end_ns` after its `start_ns`; of several
rows with the same number, the last one. A time *in* a step is its part within that row, whatever
the column `step` of the rows says. A step over all ranks runs from the earliest start to the latest
end of the ranks that completed it. Rows of `ranks[]` are over the whole trace, or over the steps
that were asked for; `summary` and `stragglers[]` are over the steady steps.

**Steady steps.** If steps were asked for, they are all steady, and so is the only step of a trace.
Otherwise the first step is warm-up. A step is *unlike* if it takes over 1.5 times the median of the
later half of all n steps (those from the index n // 2 on, by `wall_us`), or if the number of
messages of all ranks in it, or the sum of their `bytes`, is not the median over the later half (by
the column `step`). Warm-up are all steps up to the last unlike one among the first n // 4 steps (at
most 20), and the steps after the first one that take over 1.5 times that median, in a row, among
the first n // 2 (at most 20 of them).

**Collectives.** The messages of all ranks with the same `group` and `seq` are one collective,
unless their `op` is `send`, `recv` or `rpc`. (Groups of one name with other members in `run.json`
are different groups.) Its *arrivals* are the `start_ns` of its messages. Its row in `collectives[]`
is that of its `op`, `group` and the largest `bytes`. It is *mismatched* if its messages differ in
`op`, a rank has two of them, or the `bytes` of an all_reduce, reduce or reduce_scatter differ;
*partial* if a member of the group has no message in it; *open* if a message has the status `open`;
else *complete*. Its step is the `step` of its last message to arrive. Times are of complete
collectives whose messages all have an `end_ns`.

**Sends and receives.** A `send` and a `recv` with the same `group`, source, destination, `tag` and
`seq` are a pair; source and destination are the rank and its `peer`.

**Release.** A message is released when all messages that it needs have started, and not before its
own start:

- A message of a complete or open collective needs all others of it.
- Except: in a `broadcast` of Gloo, it needs its links in a binomial tree. Count the group's members
  from the root (`peer`) in the order of `run.json`: member 0 is the root, and the parent of member
  p is p without its highest bit. A message needs those of its parent, of its parent's parents, and
  of its children. In a `scatter` or `gather` of Gloo, the root needs all, and the others the root.
- Except: a message of a `reduce`, or of a `broadcast`, `scatter` or `gather` of another library,
  that ended before the last arrival, needs only the root's in a `broadcast` or `scatter`, and none
  in the others.
- In both exceptions, a message does not need those that start after its own end.
- A message of a pair needs the other. A `send` that ends before its `recv` starts needs none. On
  ranks without a device, a message counts as started at its `enqueue_ns` if it was enqueued, but
  not started, when the other one ended.
- The release of all other messages is unknown.

A release after the end of the message counts as at its end.
"""

DOCUMENTS = (
    ("ddltrace analyze --json", model.SCHEMA, model.Analysis),
    ("ddltrace compare --json", comparison.SCHEMA, comparison.Comparison),
)


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION, TERMS]
    for command, schema, root in DOCUMENTS:
        parts.append(f"# `{command}`\n\n`schema` is `{schema}`.\n")
        parts += list(sections(root, ""))
    return with_places("\n".join(parts))


def with_places(text: str) -> str:
    """Replaces names of records and of their attributes by the places of their keys."""
    found: dict[str, str] = {}
    for _, _, root in DOCUMENTS:
        for kind, place in records(root, ""):
            found.setdefault(kind.__name__, place)

    def key(match: re.Match[str]) -> str:
        place, attribute = found.get(match[1]), match[2] or ""
        return match[0] if place is None else f"`{place}{attribute}`"

    categories = ", ".join(f"`{name}`" for name in model.CATEGORIES)
    return re.sub(r"`([A-Z]\w+)(\.\w+)?`", key, text.replace("`CATEGORIES`", categories))


def records(record: type, place: str) -> Iterator[tuple[type, str]]:
    """The records in a record and their places, depth first."""
    for field in dataclasses.fields(record):
        kind = record_in(record, str(field.type)) if field.repr else None
        if kind is not None:
            many = "[]" if str(field.type).startswith("tuple[") else ""
            name = f"{place}{field.name}{many}"
            yield kind, name
            yield from records(kind, f"{name}.")


def sections(record: type, place: str) -> Iterator[str]:
    """The section of a record and those of the records in it, depth first."""
    meanings = attributes(record)
    inner: list[tuple[type, str]] = []
    lines = []
    for field in dataclasses.fields(record):
        if not field.repr:
            continue
        kind = record_in(record, str(field.type))
        many = str(field.type).startswith("tuple[")
        if kind is not None:
            inner.append((kind, f"{place}{field.name}{'[]' if many else ''}"))
        lines.append(f"- `{field.name}`: {meanings.get(field.name, '')}".rstrip(" :"))
    text = (inspect.getdoc(record) or "").partition("Attributes:\n")[0].rstrip()
    summary = text.replace("``", "`").replace("None", "null")
    title = place.rstrip(".") or "the whole"
    yield f"## {f'`{title}`' if place else title}\n\n{summary}\n\n" + "\n".join(lines) + "\n"
    for kind, name in inner:
        yield from sections(kind, f"{name}.")


def record_in(record: type, annotation: str) -> type | None:
    """The record that a field of this type holds, itself or in a list; None for plain values."""
    names = re.findall(r"[A-Z]\w+", annotation)
    found = [getattr(sys.modules[record.__module__], name, None) for name in names]
    kinds = (kind for kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind))
    return next(kinds, None)


def attributes(record: type) -> dict[str, str]:
    """What the docstring says of each attribute."""
    _, _, text = (inspect.getdoc(record) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + text.split("\n\n")[0]):
        names, colon, meaning = entry.strip().partition(": ")
        if colon:
            meaning_text = " ".join(meaning.split()).replace("``", "`").replace("None", "null")
            found |= dict.fromkeys(names.split(", "), meaning_text)
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
