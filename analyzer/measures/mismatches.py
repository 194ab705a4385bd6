"""Completed messages on which their ranks disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL
from ddltrace.analyzer.joined.join import Joined, State
from ddltrace.analyzer.measures.hangs import Hang
from ddltrace.analyzer.measures.passed import (
    DUMPS,
    Passed,
    disagreement,
    pairs_that_disagree,
    passed_by,
    sent_and_expected,
)

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

_MAX_SHOWN: Final = 20


@dataclass(frozen=True)
class Mismatch:
    """A completed message on which its ranks disagree; one that did not complete is a hang.

    Attributes:
        op: Its operation; ``send`` for a send and its receive.
        group: Its group.
        seq: Its number in the group; None for a send.
        called: The operation of each rank if these differ, else empty.
        passed: Element type and shapes or bytes of each rank if these differ, else empty.
    """

    op: str
    group: str
    seq: int | None
    called: dict[int, str] = field(default_factory=dict)
    passed: dict[int, str] = field(default_factory=dict)


def find_mismatches(trace: Trace, joined: Joined, hangs: Sequence[Hang]) -> tuple[Mismatch, ...]:
    """Finds completed messages on which ranks disagree, in the order of time, the first 20.

    Element types, and sizes that may differ from rank to rank in a joined collective, are compared
    in dumps of the Flight Recorder only, which are small.
    """
    messages, collectives = joined.messages, joined.collectives
    is_dump = trace.run.source == DUMPS
    chosen = collectives.seq != NULL
    chosen &= collectives.ranks > 1 if is_dump else collectives.state == State.MISMATCH
    hung = {(hang.group, hang.seq) for hang in hangs}
    counts = np.diff(np.append(collectives.first_row, len(joined.order)))
    called: dict[tuple[str, int | None], dict[int, str]] = {}
    for place in np.flatnonzero(chosen).tolist():
        key: tuple[str, int | None]
        key = messages.groups[collectives.group[place]], int(collectives.seq[place])
        if key not in hung:
            first = collectives.first_row[place]
            rows = joined.order[first : first + counts[place]]
            called[key] = {int(messages.rank[row]): messages.ops[messages.op[row]] for row in rows}
    passed: dict[tuple[str, int | None], dict[int, Passed]] = {key: {} for key in called}
    for rank in sorted({rank for each in called.values() for rank in each}):
        wanted = {key for key, each in called.items() if rank in each}
        for its, one in passed_by(trace.windows(rank), wanted).items():
            passed[its][rank] = one
    found = []
    for key, ops in called.items():
        op = ops[min(ops)]
        several = len(set(ops.values())) > 1
        differs = {} if several else disagreement(op, passed[key])
        if several or differs:
            described = dict(sorted(ops.items())) if several else {}
            found.append(Mismatch(op, *key, called=described, passed=differs))
    if is_dump:
        found += [
            Mismatch(
                "send",
                messages.groups[messages.group[send]],
                None,
                passed=sent_and_expected(joined, send, receive),
            )
            for send, receive in pairs_that_disagree(joined).items()
            if not messages.unfinished[[send, receive]].any()
        ]
    return tuple(found[:_MAX_SHOWN])
