"""Communication by parallel dimension: data, tensor, pipeline, expert and context.

Each message belongs to one dimension, by the description of its group. Where
the description names none, as that of the default group, a message that carries parameters or their
gradients is data parallelism, and any other is unknown.

For each dimension the times are those of `breakdown`, of its messages alone, within the steady
steps. Messages of several dimensions can be in flight at the same time: then each of the dimensions
has this time, and they sum to more than the rank's communication.

PyTorch keeps a description of each group. A dimension of a device mesh describes its groups as
``mesh_`` and its name (``torch/distributed/device_mesh.py``, PyTorch 2.13), so `_WORDS` are those
of descriptions and of mesh dimensions. The tracer adds such names to the description of the default
group, where a mesh uses it for a dimension (``default_pg, mesh_tp``).

- Megatron-LM and NeMo, ``megatron/core/parallel_state.py`` (commit 00caa53af309):
  ``TENSOR_MODEL_PARALLEL_GROUP``, ``DATA_PARALLEL_GROUP_WITH_CP``, ``EXPERT_MODEL_PARALLEL_GROUP``.
- torchtitan, ``torchtitan/distributed/parallel_dims.py`` (commit 0119de156de5, and its later names
  ``batch``, ``loss``, ``fsdp``, ``efsdp``): ``dp_replicate``, ``dp_shard_cp``, ``tp``, ``pp``.
- DeepSpeed, ``deepspeed/utils/groups.py`` (commit 0899bfad0257): ``data_parallel``,
  ``sequence_parallel``, ``tensor_parallel``. Its other groups have no description.
- PyTorch's tutorials of hybrid sharding: ``replicate``, ``shard``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ddltrace.analyzer.events.event_columns import BoolArray, IntArray, distinct
from ddltrace.analyzer.events.interval_sets import Spans, lengths_within, subtract, union
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Releases
from ddltrace.analyzer.measures.breakdown import in_flight
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, merged_by
from ddltrace.analyzer.measures.rank_measures import bytes_sent
from ddltrace.analyzer.measures.steps import Steps, in_steps

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

DATA: Final = "data"
UNKNOWN: Final = "unknown"

_WORDS: Final = {
    DATA: (
        *("dp", "ddp", "fsdp", "hsdp", "efsdp", "edp", "data"),
        *("replicate", "replica", "shard", "batch", "loss"),
    ),
    "tensor": ("tp", "etp", "tensor"),
    # The embedding's gradients are summed over the first and the last stage.
    "pipeline": ("pp", "pipe", "pipeline", "embd", "embedding"),
    "expert": ("ep", "expert", "moe"),
    # DeepSpeed's Ulysses splits sequences as well. Megatron's sequence parallelism has no groups.
    "context": ("cp", "context", "sp", "seq", "sequence", "ulysses"),
}
_DIMENSION_OF: Final = {word: name for name, words in _WORDS.items() for word in words}

_ANY_MODEL: Final = frozenset({"model", "mp"})
"""Alone they stand for tensor parallelism in some frameworks, for more than that in Megatron-LM."""

_WHOLE: Final = {
    # Megatron-LM's token dispatchers for experts use it.
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": UNKNOWN,
}
_OWN: Final = "ddltrace:"
_FILLING: Final = re.compile(r"parallel(ism)?|groups?", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def dimension_of(description: str) -> str | None:
    """Returns the parallel dimension of a group: a name of the table or `UNKNOWN`.

    Data parallelism that shares its groups with context or expert parallelism is data parallelism:
    gradients are summed over both. Tensor parallelism of experts is tensor parallelism.

    Args:
        description: Of the group.

    Returns:
        `UNKNOWN` for several dimensions; None if the description names none, as that of the
        default group.
    """
    if description in _WHOLE:
        return _WHOLE[description]
    if description.startswith(_OWN):
        return None
    words = {word.lower() for word in _WORD.findall(_FILLING.sub(" ", description))}
    found = {_DIMENSION_OF[word] for word in words & _DIMENSION_OF.keys()}
    if DATA in found:
        found -= {"context", "expert"}
    elif "tensor" in found:
        found -= {"expert"}
    if len(found) == 1:
        return found.pop()
    return UNKNOWN if found or words & _ANY_MODEL else None


_MOST_GROUPS: Final = 16


@dataclass(frozen=True)
class DimensionRow:
    """Communication in one parallel dimension, means per rank and steady step.

    The dimension is that which a group's description or device mesh names. If it names none, as
    that of the default group, messages that carry parameters or their gradients are ``data``, and
    others ``unknown``. Messages of several dimensions can be in flight at the same time, so the
    times of the rows can sum to more than a rank's communication. In a trace without steps, the
    means are per rank over the whole trace.

    Attributes:
        dimension: ``data``, ``tensor``, ``pipeline``, ``expert``, ``context`` or ``unknown``.
        groups: Descriptions of its groups, or the names of those without one; at most 16.
        exposed_us: Time with a message in flight and without compute.
        wait_us: Time in which all its messages in flight wait for another rank.
        transfer_us: Time with a message in flight whose ranks have all arrived.
        comm_us: Time with a message in flight.
        messages: Messages that begin.
        bytes: Bytes sent, as in `RankRow.bytes_sent`; null if no size is known.
    """

    dimension: str
    groups: tuple[str, ...]
    exposed_us: float | None
    wait_us: float | None
    transfer_us: float | None
    comm_us: float | None
    messages: float
    bytes: float | None


class DimensionTimes(NamedTuple):
    """Communication in one dimension, summed over ranks and steps; times in nanoseconds.

    Attributes:
        groups: Descriptions of its groups; the name of a group without one.
        messages: Number of messages.
        timed: Those whose time in flight is known and counts as communication.
        released: Those of them that were joined with those of other ranks.
        sized: Messages whose size is known.
        sent: Bytes that the ranks sent.
        comm: Time with messages in flight.
        exposed: The part of it without compute; NaN if the compute of a rank is unknown.
        wait: The part of it in which all messages in flight wait for another rank.
        transfer: The part of it in which a message in flight has all its ranks.
    """

    groups: frozenset[str]
    messages: float
    timed: float
    released: float
    sized: float
    sent: float
    comm: float
    exposed: float
    wait: float
    transfer: float

    def plus(self, other: DimensionTimes) -> DimensionTimes:
        """The sums of both."""
        groups = self.groups | other.groups
        return DimensionTimes(groups, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


def _times(joined: JoinedSteps) -> dict[str, DimensionTimes]:
    """Measures each dimension in the steady steps; without steps, in the whole trace."""
    return merged_dimensions(
        _of_rank(joined.trace, scan, joined.joined.releases(rank), joined.steps)
        for rank, scan in joined.scans.items()
    )


def merged_dimensions(
    parts: Iterable[Mapping[str, DimensionTimes]],
) -> dict[str, DimensionTimes]:
    """Adds up dimensions of several ranks or ranges of steps."""
    found: dict[str, DimensionTimes] = {}
    for part in parts:
        for name, times in part.items():
            found[name] = found[name].plus(times) if name in found else times
    return found


def dimension_rows(
    times: Mapping[str, DimensionTimes], rank_steps: int
) -> tuple[DimensionRow, ...]:
    """One row per dimension, the longest exposed time first.

    Args:
        times: See `DimensionTimes`.
        rank_steps: Number of steps of all ranks over which they were summed.
    """

    def mean(ns: float, known: float) -> float | None:
        return ns / 1e3 / rank_steps if known and not np.isnan(ns) else None

    rows = [
        DimensionRow(
            dimension=name,
            groups=tuple(sorted(one.groups)[:_MOST_GROUPS]),
            exposed_us=mean(one.exposed, one.timed),
            wait_us=mean(one.wait, one.released),
            transfer_us=mean(one.transfer, one.released),
            comm_us=mean(one.comm, one.timed),
            messages=one.messages / rank_steps,
            bytes=one.sent / rank_steps if one.sized else None,
        )
        for name, one in times.items()
        if one.messages
    ]
    return tuple(sorted(rows, key=lambda row: (-(row.exposed_us or 0), -(row.comm_us or 0))))


class _Rank(NamedTuple):
    """What the measures of a rank depend on.

    Attributes:
        scan: The rank.
        releases: When its messages were released, and by whom.
        groups: What the group of each code of `Messages.group` is called, that of `NULL` last.
        chosen: Which of its messages begin in the steps.
        begin: Starts of the steps.
        until: Their ends.
    """

    scan: RankScan
    releases: Releases
    groups: list[str]
    chosen: BoolArray
    begin: IntArray
    until: IntArray

    def total(self, spans: Spans) -> float:
        """Length of a set within the steps, ns."""
        return float(lengths_within(spans, self.begin, self.until).sum())


def _of_rank(
    trace: Trace, scan: RankScan, releases: Releases, steps: Steps
) -> dict[str, DimensionTimes]:
    """The dimensions in which a rank communicates."""
    messages = scan.messages
    described = [trace.group_description(name, scan.rank) for name in messages.groups]
    # Last, for messages without a group.
    dimensions = np.array([*(dimension_of(text) or "" for text in described), ""])
    groups = [text or name for text, name in zip(described, messages.groups, strict=True)]
    names = dimensions[messages.group]
    names = np.where(names == "", np.where(messages.tensor_count > 0, DATA, UNKNOWN), names)
    if len(steps):
        numbers = steps.number[steps.steady]
        mine, chosen = in_steps(scan.step, numbers), in_steps(messages.step, numbers)
        begin, until = scan.step_start[mine], scan.step_end[mine]
    else:
        chosen = np.ones(len(messages), dtype=bool)
        begin, until = np.array([scan.first]), np.array([scan.last])
    rank = _Rank(scan, releases, [*groups, ""], chosen, begin, until)
    return {name: _measure(rank, names == name) for name in np.unique(names).tolist()}


def _measure(rank: _Rank, of: BoolArray) -> DimensionTimes:
    """Measures the messages of a rank that belong to one dimension.

    Args:
        of: Which of its messages these are.
    """
    messages, chosen = rank.scan.messages, of & rank.chosen
    counted = of & messages.in_flight & messages.closed
    known, _, transfer, waiting = in_flight(messages, rank.releases, counted)
    flight = union(messages.start[counted], messages.end[counted])
    compute = rank.scan.activity.compute
    size = np.maximum(messages.bytes, messages.wire_bytes)
    groups = distinct(messages.group[chosen]).tolist()
    return DimensionTimes(
        groups=frozenset(filter(None, (rank.groups[group] for group in groups))),
        messages=int(chosen.sum()),
        timed=int((counted & chosen).sum()),
        released=int((known & chosen).sum()),
        sized=int((size[chosen] >= 0).sum()),
        sent=bytes_sent(rank.scan, chosen),
        comm=rank.total(flight),
        exposed=np.nan if compute is None else rank.total(subtract(flight, compute)),
        wait=rank.total(waiting),
        transfer=rank.total(transfer),
    )


DIMENSIONS: Final[Measure[dict[str, DimensionTimes], tuple[DimensionRow, ...]]] = Measure(
    "dimensions",
    lambda whole: dimension_rows(whole.found.of(DIMENSIONS), int(whole.window.sum())),
    _times,
    merged_by(lambda former, later: merged_dimensions([former, later])),
    of="steady",
)
