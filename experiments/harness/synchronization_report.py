"""Reports from a trace how far workers ran ahead of each other, and whether their rule was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow.compute as pc

from ddltrace.analyzer.trace.opened_trace import Trace
from ddltrace.experiments.grammar import Grammar
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.synchronization.adpsgd import AdPsgd
from ddltrace.experiments.synchronization.gossip import Gossip
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.experiments.synchronization.invariants import (
    check_gossip,
    check_groups,
    check_pairs,
    check_servers,
)
from ddltrace.experiments.synchronization.marks import PREFIX, Mark, read_mark
from ddltrace.experiments.synchronization.rule import ServerRule, Synchronization
from ddltrace.tracer.errors import UsageError

_GRAMMAR: Final = Grammar(
    "rule of synchronization",
    lambda: [entry for entry in techniques() if entry.axis == "synchronization"],
)
_SHOWN: Final = 3
"""Violations that are named."""


def synchronization_of(trace: Trace) -> dict[str, Any] | None:
    """The synchronization of a run, read from the marks of its trace.

    Args:
        trace: Any trace.

    Returns:
        None if the trace has no marks. Else ``rule``, its spec; ``clocks``, the number of steps
        of each worker by its global rank; ``staleness``, by how many steps the slowest worker's
        updates in a read were behind the step that the read began (``counts``, ``mean``,
        ``max``; None without reads), among the workers that still trained then;
        ``blocked_us``, the mean time for which a read was held
        back, and ``blocked_us_by_worker``, its sum for each worker; ``updates`` (``pushed``,
        ``applied``, ``dropped``); ``bounds`` (``first``, ``last``, ``min``, ``max``) by which
        reads were admitted; ``died``, the workers that were dropped; ``violations``, what broke
        the rule's promises; ``unchecked``, why they could not be checked, or None.
    """
    marks = {rank: list(_marks(trace, rank)) for rank in trace.ranks}
    rules = [mark for own in marks.values() for mark in own if mark.what == "rule"]
    if not rules:
        return None
    spec = _part_of(rules[-1].texts.get("spec", ""))
    rule = _parse_rule(spec)
    if rule is None:
        return None
    # Without servers that follow the rule, ranks that only sum have no marks.
    workers = list(rules[-1].numbers.get("workers", ())) or [r for r, own in marks.items() if own]
    servers = {rank: own for rank, own in marks.items() if rank not in workers}
    of_workers = {rank: own for rank, own in marks.items() if rank in workers}
    own_marks = [mark for own in of_workers.values() for mark in own]
    reads = _reads(servers, workers) if servers else own_marks
    unchecked = _unchecked(trace)
    if unchecked is None and has_several_models(marks):
        unchecked = "the job trains several models, and the trace does not tell their clocks apart"
    return {
        "rule": spec,
        "clocks": {str(worker): _steps(of_workers.get(worker, ())) for worker in workers},
        "staleness": _distribution(_staleness(reads, workers)),
        **_blocked(reads),
        "updates": _updates(rule, workers, servers, own_marks),
        "bounds": _bounds(reads),
        "died": sorted(
            {
                mark.worker
                for own in servers.values()
                for mark in own
                if mark.what == "leave" and mark.texts.get("how") == "died"
            }
        ),
        "violations": [] if unchecked else _violations(rule, workers, servers, of_workers),
        "unchecked": unchecked,
    }


def has_several_models(marks: Mapping[int, Sequence[Mark]]) -> bool:
    """Whether the rule was applied to more than one model.

    Args:
        marks: The marks of each rank.
    """
    rules = [[mark for mark in own if mark.what == "rule"] for own in marks.values()]
    servers = [number for own in rules for mark in own if (number := mark.one("servers"))]
    return any(len(own) > 1 for own in rules) or len(servers) > max(servers, default=0)


def runs_ahead(found: Mapping[str, Any]) -> bool:
    """Whether ranks can be at different steps at the same time."""
    rule = _parse_rule(found["rule"])
    return rule is not None and rule.place in ("servers", "peers")


def merged(values: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The synchronization of several runs of one strategy as one; None for no runs.

    Counts and the blocked times of workers are summed over the runs; `blocked_us` is their mean.
    """
    if len(values) < 2:
        return values[0] if values else None
    blocked = [value["blocked_us"] for value in values if value["blocked_us"] is not None]
    bounds = [value["bounds"] for value in values if value["bounds"]]
    staleness = _sums([value["staleness"]["counts"] for value in values if value["staleness"]])
    extremes = {how: take(each[how] for each in bounds)
                for how, take in (("min", min), ("max", max)) if bounds}  # fmt: skip
    return {
        **values[0],
        "clocks": _sums([value["clocks"] for value in values]),
        "updates": _sums([value["updates"] for value in values if value["updates"]]) or None,
        "blocked_us_by_worker": _sums([value["blocked_us_by_worker"] for value in values]),
        "staleness": _distribution(Counter({int(k): n for k, n in staleness.items()}).elements()),
        "blocked_us": sum(blocked) / len(blocked) if blocked else None,
        "bounds": bounds[-1] | extremes if bounds else None,
        "died": sorted({rank for value in values for rank in value["died"]}),
        "violations": [text for value in values for text in value["violations"]],
    }


def _sums(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of each number."""
    total: Counter[str] = Counter()
    for value in values:
        for key, number in value.items():
            total[key] += number  # `update` would drop what is zero
    return dict(total)


def reason_of(found: Mapping[str, Any]) -> str | None:
    """Why a run broke its rule; None if it did not."""
    violations = found["violations"]
    if not violations:
        return None
    more = f" and {len(violations) - _SHOWN} more" if len(violations) > _SHOWN else ""
    return f"{found['rule']} was not kept: {'; '.join(violations[:_SHOWN])}{more}"


def notes_of(found: Mapping[str, Any]) -> list[str]:
    """What restricts the validity of a run."""
    notes = [
        f"worker {rank} died after {found['clocks'].get(str(rank), 0)} steps and was dropped; "
        "the others went on"
        for rank in found["died"]
    ]
    if found["unchecked"]:
        notes.append(f"the rule {found['rule']} could not be checked: {found['unchecked']}")
    return notes


def _parse_rule(spec: str) -> Synchronization | None:
    """The rule that a spec names by itself; None if it names none."""
    try:
        value = _GRAMMAR.read(spec)["synchronization"].of(Synchronization)
    except UsageError:
        return None
    return value


def _marks(trace: Trace, rank: int) -> Iterable[Mark]:
    table = trace.events(rank).select(["start_ns", "end_ns", "kind", "name"])
    table = table.filter(pc.equal(table["kind"].cast("string"), "marker"))
    table = table.filter(pc.starts_with(table["name"].cast("string"), PREFIX))
    found = []
    for row in table.to_pylist():
        mark = read_mark(row["name"], row["start_ns"], row["end_ns"] or row["start_ns"])
        if mark is not None:
            found.append(mark)
    # A read is marked when it is answered.
    return sorted(found, key=lambda mark: mark.end_ns)


def _reads(servers: Mapping[int, Sequence[Mark]], workers: Sequence[int]) -> list[Mark]:
    """Of each read the answer that came last, or was the stalest, of all servers."""
    by_read: dict[tuple[int, int], tuple[tuple[int, int], Mark]] = {}
    for marks in servers.values():
        for mark in marks:
            if mark.what == "read":
                key = (mark.worker, mark.clock)
                cost = (_age(mark, workers) or 0, mark.end_ns - mark.start_ns)
                if key not in by_read or cost > by_read[key][0]:
                    by_read[key] = cost, mark
    return sorted((mark for _, mark in by_read.values()), key=lambda mark: mark.end_ns)


def _age(mark: Mark, workers: Sequence[int]) -> int | None:
    """By how many steps the slowest update of a read or average is behind it.

    A worker that has finished or died sends no further updates, so none of them is missing.

    Args:
        workers: Global ranks of the workers, in the order of `held`.

    Returns:
        The steps; None if the mark is neither a read nor an average.
    """
    if mark.what == "read":
        active = mark.numbers.get("active", ())
        held = [
            count
            for worker, count in zip(workers, mark.numbers.get("held", ()), strict=False)
            if worker in active
        ]
        return max(0, mark.clock - min(held)) if held else None
    if mark.what == "average":
        return abs(mark.clock - (mark.one("peer_clock") or 0))
    return 0 if mark.what == "mix" else None


def _staleness(reads: Iterable[Mark], workers: Sequence[int]) -> list[int]:
    return [age for mark in reads if (age := _age(mark, workers)) is not None]


def _distribution(ages: Iterable[int]) -> dict[str, Any] | None:
    counts = Counter(ages)
    total = counts.total()
    if not total:
        return None
    return {
        "counts": {str(age): counts[age] for age in sorted(counts)},
        "mean": sum(age * count for age, count in counts.items()) / total,
        "max": max(counts),
    }


def _blocked(reads: Iterable[Mark]) -> dict[str, Any]:
    by_worker: dict[str, float] = {}
    count = 0
    for mark in reads:
        if mark.what in ("read", "mix", "average"):
            count += 1
            own = by_worker.setdefault(str(mark.worker), 0.0)
            by_worker[str(mark.worker)] = own + (mark.end_ns - mark.start_ns) / 1e3
    return {
        "blocked_us": sum(by_worker.values()) / count if count else None,
        "blocked_us_by_worker": by_worker,
    }


def _updates(
    rule: Synchronization,
    workers: Sequence[int],
    servers: Mapping[int, Sequence[Mark]],
    own_marks: Sequence[Mark],
) -> dict[str, int] | None:
    """Pushes of all workers, as the first server has them."""
    if not isinstance(rule, ServerRule) or not servers:
        return None
    first = servers[min(servers)]
    pushed = sum(mark.what == "step" and mark.worker in workers for mark in own_marks)
    return {
        "pushed": pushed,
        "applied": sum(mark.what == "apply" for mark in first),
        "dropped": sum(mark.what == "drop" for mark in first),
    }


def _bounds(reads: Iterable[Mark]) -> dict[str, int] | None:
    bounds = [bound for mark in reads if (bound := mark.one("bound")) is not None]
    if not bounds:
        return None
    return {"first": bounds[0], "last": bounds[-1], "min": min(bounds), "max": max(bounds)}


def _steps(marks: Iterable[Mark]) -> int:
    """How many steps a worker made."""
    return len({mark.clock for mark in marks if mark.what in ("step", "mix", "group", "average")})


def _part_of(spec: str) -> str:
    """The part of a spec that names the rule."""
    return next(
        (part for part in spec.split("+") if part.partition(":")[0] in _GRAMMAR.names()), spec
    )


def _unchecked(trace: Trace) -> str | None:
    dropped = sum(info.dropped for info in trace.run.ranks)
    return f"{dropped} events are missing from the trace" if dropped else None


def _violations(
    rule: Synchronization,
    workers: Sequence[int],
    servers: Mapping[int, Sequence[Mark]],
    of_workers: Mapping[int, Sequence[Mark]],
) -> list[str]:
    if isinstance(rule, Gossip):
        return check_gossip(rule, of_workers)
    if isinstance(rule, AdPsgd):
        return check_pairs(of_workers)
    if isinstance(rule, Grouped):
        return check_groups(rule, of_workers)
    assert isinstance(rule, ServerRule)
    return check_servers(rule, workers, servers, of_workers)
