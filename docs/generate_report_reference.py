"""Writes `docs/report-reference.md` from the records of the JSON: `python3 dev.py docs`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ddltrace.analyzer import model
from ddltrace.analyzer.compare import comparison, regression
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.measures.hta_definitions import HtaTables
from ddltrace.analyzer.report import threshold
from ddltrace.experiments.harness import (
    results,
    settings,
    step_intervals,
)
from ddltrace.experiments.harness.synchronization_report import synchronization_of
from ddltrace.experiments.transport_benchmark import comparison as transports

PAGE = Path(__file__).with_name("report-reference.md")

INTRODUCTION = """\
# What the JSON holds

Written by `python3 dev.py docs` from the records that hold it; a test fails when the two differ.

Times are microseconds (`_us`), shares are fractions from 0 to 1, bandwidths are gigabits per
second (`_gbps`). What the trace cannot give is null, never zero. Keys may be added; those that
are here keep their meaning as long as `schema` stays the same. In Python the same records are
the attributes of `Analysis`, see [python-api.md](python-api.md).

This page has the keys of `ddltrace analyze --json`, `ddltrace compare --json`, `results.json` of
an experiment and `ddltrace experiment transports --json`, and the names that `--fail-on` takes.
[sql-reference.md](sql-reference.md) has the columns of the tables of `ddltrace query`.
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

DESCRIBED = "`count`, `mean`, `std`, `min`, `p25`, `p50`, `p75` and `max`"

OF_ANALYSIS = f"""\
## `definitions`, `hta`

- `definitions`: `ddltrace`, or `hta` with `--definitions hta`. Then `overlap_ratio`, `idle_us`,
  `compute_us` and `span_us` of `ranks[]` are Holistic Trace Analysis's (null where it has none),
  and there is the key `hta` with its tables ([how its definitions
  differ](trace-format.md#imported-traces)).
- `hta.idle_time[]`: {{idle_time}} Columns: `rank`, `stream`, `host_wait_us`, `kernel_wait_us`,
  `other_us`, as in `StreamRow`.
- `hta.queue_length[]`: {{queue_length}} Columns: `rank`, `stream`, and
  {DESCRIBED} of the length over all changes of it.
- `hta.memory_bandwidth[]`: {{memory_bandwidth}} Columns: `rank`, `name`, and
  {DESCRIBED} of the bandwidth over all changes of it.

## Names that `analyze --fail-on` takes

These keys of `summary`, as in `--fail-on "step_us.p50>200000"`, with `<`, `<=`, `>`, `>=`, `==`
or `!=`: {{keys}}.
"""

OF_COMPARISON = """\
## Names that `compare --fail-on` takes

A change (after - before) of one of these, as in `--fail-on "step_us>+5%"` (percent of before) or
`--fail-on "overlap_ratio<-0.1"`: {keys}. `step_us` and
`rank_step_us` are means; names of a category and `_us` are the critical path's. The check fails if
the change is beyond the limit and more than noise.
"""

OF_SETTINGS = {
    "ddltrace": "Version of ddltrace that began the experiment.",
    "resumed_with_ddltrace": "Another version that continued it; absent if none did.",
    "cpus": "Processors of the machine.",
    "torch": "Version of PyTorch; null until a run has ended.",
    "gradient_bytes": "Bytes of all gradients; null for a job of your own.",
}

DERIVED: dict[type, dict[str, tuple[str, type | None]]] = {
    results.Results: {
        "schema": ("Name and version of the form of this file.", None),
        "headline": ("The result in one or two sentences.", None),
        "plain": ("`strategy` of the row of `fifo`; null if there is none.", None),
        "tuned_ddp": (
            "`strategy` of the fastest row of DistributedDataParallel, or null.",
            None,
        ),
    },
    results.Row: {
        "cycle_steps": ("Steps after which its exchanges repeat; 1 if all are alike.", None),
        "step_time": ("Its step time over rounds; null without steps.", step_intervals.StepTime),
        "difference": (
            "Difference of its step time to the baseline's; null for the baseline.",
            step_intervals.Difference,
        ),
        "speedup_plain": ("Speed-up over `plain`; null for itself.", step_intervals.Speedup),
        "speedup_tuned_ddp": (
            "Speed-up over `tuned_ddp`; null for itself.",
            step_intervals.Speedup,
        ),
        "loss_difference": (
            "Its loss beside that of `tuned_ddp`, or of the baseline without a row of DDP.",
            results.LossDifference,
        ),
    },
    transports.TransportResult: {
        "fits": ("Operation -> latency and bandwidth, fitted over its sizes.", transports.Fit),
    },
}
"""Record -> keys that its JSON has besides its attributes: meaning, and the record in each."""

DOCUMENTS: tuple[tuple[str, str, tuple[tuple[type, str], ...]], ...] = (
    ("ddltrace analyze --json", model.SCHEMA, ((model.Analysis, ""),)),
    ("ddltrace compare --json", comparison.SCHEMA, ((comparison.Comparison, ""),)),
    (
        "results.json",
        results.SCHEMA,
        ((results.Results, ""), (settings.Settings, "settings.")),
    ),
    (
        "ddltrace experiment transports --json",
        transports.SCHEMA,
        (
            (transports.Settings, "settings."),
            (transports.TransportResult, "transports[]."),
        ),
    ),
)

NOTES = {
    "results.json": (
        "`ddltrace experiment run` writes it into the experiment's directory and prints the same "
        "with `--json`; so does `ddltrace experiment compare --json`."
    )
}


def render() -> str:
    """The page's text."""
    parts = [INTRODUCTION, TERMS]
    for command, schema, roots in DOCUMENTS:
        note = f" {NOTES[command]}" if command in NOTES else ""
        parts.append(f"# `{command}`\n\n`schema` is `{schema}`.{note}\n")
        for root, place in roots:
            parts += sections(root, place)
        parts += more(roots[0][0])
    return with_places("\n".join(parts))


def more(root: type) -> list[str]:
    """The parts of a document that are not records."""
    if root is model.Analysis:
        tables = attributes(HtaTables)
        return [OF_ANALYSIS.format(keys=names(threshold.KEYS), **tables)]
    if root is comparison.Comparison:
        return [OF_COMPARISON.format(keys=names(regression.KEYS))]
    if root is results.Results:
        text = (inspect.getdoc(synchronization_of) or "").partition("Else ")[2]
        synchronization = " ".join(text.split()).replace("``", "`").replace("None", "null")
        lines = [f"- `{name}`: {meaning}" for name, meaning in OF_SETTINGS.items()]
        return [
            "Besides these, the settings have\n\n" + "\n".join(lines) + "\n",
            f"## `rows[].runs[].synchronization`\n\nIts keys: {synchronization}\n",
        ]
    return []


def names(keys: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(f"`{key}`" for key in keys)


def with_places(text: str) -> str:
    """Replaces names of records and of their attributes by the places of their keys."""
    found: dict[str, str] = {}
    for _, _, roots in DOCUMENTS:
        for root, where in roots:
            for kind, place in records(root, where):
                found.setdefault(kind.__name__, place)

    def key(match: re.Match[str]) -> str:
        place, attribute = found.get(match[1]), match[2] or ""
        return match[0] if place is None else f"`{place}{attribute}`"

    categories = ", ".join(f"`{name}`" for name in CATEGORIES)
    return re.sub(r"`([A-Z]\w+)(\.\w+)?`", key, text.replace("`CATEGORIES`", categories))


def records(record: type, place: str) -> Iterator[tuple[type, str]]:
    """The records in a record and their places, depth first."""
    for kind, name in records_of(record, place):
        yield kind, name
        yield from records(kind, f"{name}.")


def records_of(record: type, place: str) -> Iterator[tuple[type, str]]:
    """The records that the attributes of a record hold, and their places."""
    for field in dataclasses.fields(record):
        kind = record_in(record, str(field.type)) if field.repr else None
        if kind is not None:
            many = "[]" if str(field.type).startswith(("tuple[", "list[")) else ""
            yield kind, f"{place}{field.name}{many}"
    for name, (_, kind) in DERIVED.get(record, {}).items():
        if kind is not None:
            yield kind, f"{place}{name}"


def sections(record: type, place: str) -> Iterator[str]:
    """The section of a record and those of the records in it, depth first."""
    meanings = attributes(record)
    keys = {field.name: meanings.get(field.name, "") for field in fields_of(record)}
    keys |= {name: meaning for name, (meaning, _) in DERIVED.get(record, {}).items()}
    lines = [f"- `{name}`: {meaning}".rstrip(" :") for name, meaning in keys.items()]
    text = (inspect.getdoc(record) or "").partition("Attributes:\n")[0].rstrip()
    summary = text.replace("``", "`").replace("None", "null")
    title = place.rstrip(".") or "the whole"
    yield f"## {f'`{title}`' if place else title}\n\n{summary}\n\n" + "\n".join(lines) + "\n"
    for kind, name in records_of(record, place):
        yield from sections(kind, f"{name}.")


def fields_of(record: type) -> list[dataclasses.Field[Any]]:
    """The attributes that are keys of the JSON."""
    return [field for field in dataclasses.fields(record) if field.repr]


def record_in(record: type, annotation: str) -> type | None:
    """The record that a field of this type holds, itself or in a list; None for plain values."""
    names = re.findall(r"[A-Z]\w+", annotation)
    found = [getattr(sys.modules[record.__module__], name, None) for name in names]
    kinds = (kind for kind in found if isinstance(kind, type) and dataclasses.is_dataclass(kind))
    return next(kinds, None)


def attributes(record: Any, title: str = "Attributes") -> dict[str, str]:
    """What the docstring says of each attribute, or of what another title lists."""
    _, _, listing = (inspect.getdoc(record) or "").partition(f"{title}:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + listing.split("\n\n")[0]):
        listed, colon, meaning = " ".join(entry.split()).partition(": ")
        if colon:
            text = meaning.replace("``", "`").replace("None", "null")
            found |= dict.fromkeys(listed.split(", "), text)
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
