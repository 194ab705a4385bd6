"""Properties of a job on which advice depends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from ddltrace.analyzer.events.event_columns import NULL, BoolArray, IntArray, distinct, place_in
from ddltrace.analyzer.events.rank_scan import RankScan
from ddltrace.analyzer.joined.join import Joined
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.measure import JoinedSteps, Measure, merged_together
from ddltrace.analyzer.measures.savings import find_path_savings
from ddltrace.analyzer.measures.steps import in_steps

if TYPE_CHECKING:
    from ddltrace.analyzer.trace.opened_trace import Trace

Wrapper: TypeAlias = Literal["ddp", "fsdp", "deepspeed"]
"""What exchanges the gradients of a job."""

_REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter")
"""Operations that exchange gradients; others carry parameters, also after gradients are ready."""

_GOOD_PART: Final = 0.25


@dataclass(frozen=True)
class Exchange:
    """The collectives of one operation in a steady step, with gradients or without.

    Attributes:
        op: The operation.
        count: How many, mean per step.
        bytes: Input bytes of one rank, all of them together, mean per step.
        largest: Input bytes of the largest.
        transfer_us: Their transfers, summed, mean per step.
        ranks: How many take part.
        gradients: Whether they are known to carry gradients.
    """

    op: str
    count: float
    bytes: float
    largest: int
    transfer_us: float
    ranks: int
    gradients: bool = False


@dataclass(frozen=True)
class JobFacts:
    """Properties of the job, derived from its steady steps.

    Attributes:
        exchanges: Its collectives by operation, the longest transfer first.
        sharded: Gradients go to the ranks that own them (FSDP, ZeRO): reduce_scatters are known to
            carry them.
        replicated: Every rank has all gradients (DDP): all_reduces are known to carry them, and
            nothing is sharded.
        buckets: DistributedDataParallel exchanges the gradients, in buckets.
        shares_update: Ranks exchange updated parameters in each step (ZeRO): they broadcast or
            gather a large part of the bytes that they reduce.
        element_bytes: Bytes of one element of the gradients on the wire; None if unknown.
        deepspeed: DeepSpeed exchanges the gradients: its options replace those of DDP and FSDP.
        update_names: Names of what runs in the optimizer, lower case.
        link: For sends and receives, the mean traffic of a link in a step: messages, bytes, and
            the transfers of a receiving rank; None without any.
        sends_in_a_row: Part of the sends that follow one to the same rank, with no receive between:
            only these could go in one message.
    """

    exchanges: tuple[Exchange, ...] = ()
    sharded: bool = False
    replicated: bool = False
    buckets: bool = False
    shares_update: bool = False
    element_bytes: float | None = None
    deepspeed: bool = False
    update_names: tuple[str, ...] = ()
    link: Exchange | None = None
    sends_in_a_row: float = 0.0

    @property
    def wrapper(self) -> Wrapper | None:
        """What exchanges the gradients; None if unknown."""
        if self.deepspeed:
            return "deepspeed"
        if self.sharded:
            return "fsdp"
        return "ddp" if self.replicated and self.buckets else None


def _facts(found: JoinedSteps) -> JobFacts:
    """Derives the properties of a job from its steady steps."""
    trace, scans, joined, steady = found.trace, found.scans, found.joined, found.steady
    parts = found.once(find_path_savings).parts
    steps = max(len(steady), 1)
    collectives, messages = joined.collectives, joined.messages
    chosen = np.flatnonzero(in_steps(collectives.step, steady) & collectives.timed)
    deepspeed = any("deepspeed" in info.versions for info in trace.run.ranks)
    carries = np.zeros(len(collectives) + 1, dtype=bool)
    carries[joined.collective[_gradients(scans, joined)]] = True
    # DeepSpeed sends copies of gradients, which cannot be told from other tensors.
    carries |= deepspeed
    exchanges = []
    for op, gradients in sorted(
        set(zip(collectives.op[chosen].tolist(), carries[chosen].tolist(), strict=True))
    ):
        mine = chosen[(collectives.op[chosen] == op) & (carries[chosen] == gradients)]
        size = np.maximum(collectives.bytes[mine], 0)
        transfer = np.maximum(collectives.end[mine] - collectives.last[mine], 0)
        exchanges.append(
            Exchange(
                op=messages.ops[op],
                count=len(mine) / steps,
                bytes=float(size.sum()) / steps,
                largest=int(size.max()),
                transfer_us=float(transfer.sum()) / 1e3 / steps,
                ranks=int(collectives.ranks[mine].max()),
                gradients=gradients,
            )
        )
    reduced = {each.op for each in exchanges if each.ranks > 1 and each.gradients}
    sharded = "reduce_scatter" in reduced
    return JobFacts(
        exchanges=tuple(sorted(exchanges, key=lambda exchange: -exchange.transfer_us)),
        sharded=sharded,
        replicated=not sharded and "all_reduce" in reduced,
        buckets=any(bool(scan.messages.in_bucket.any()) for scan in scans.values()),
        shares_update=_shares_update(exchanges),
        element_bytes=_element_bytes(trace, scans, joined),
        deepspeed=deepspeed,
        update_names=tuple(
            part.name.lower() for part in parts if part.category == "update" and part.name
        ),
        link=_link(joined, steady),
        sends_in_a_row=_sends_in_a_row(joined, steady),
    )


def _gradients(scans: Mapping[int, RankScan], joined: Joined) -> BoolArray:
    """Whether each message is known to carry gradients.

    It reduces, carries parameters by name, and was enqueued after the first gradient of its step
    was ready: before, it carries the parameters themselves, as averages of local SGD do. Where
    gradients are not recorded, a message with named parameters counts.
    """
    messages = joined.messages
    reduces = np.array([op in _REDUCING for op in [*messages.ops, ""]])[messages.op]
    found = np.asarray(reduces & (messages.tensor_count > 0))
    for rank, scan in scans.items():
        if not len(scan.gradient_time):
            continue
        rows = joined.rows(rank)
        order = np.lexsort((scan.gradient_time, scan.gradient_step))
        steps, first = np.unique(scan.gradient_step[order], return_index=True)
        begins = scan.gradient_time[order][first]
        at = place_in(messages.step[rows], steps)
        found[rows] &= (at != NULL) & (messages.enqueue[rows] >= begins[at])
    return found


def _sends_in_a_row(joined: Joined, steady: IntArray) -> float:
    messages = joined.messages
    rows = np.flatnonzero(messages.is_p2p & in_steps(messages.step, steady))
    sends = messages.op_is("send")[rows]
    if not sends.any():
        return 0.0
    follows = sends[1:] & sends[:-1]
    for column in (messages.rank, messages.peer, messages.step):
        follows &= column[rows][1:] == column[rows][:-1]
    return float(follows.sum() / sends.sum())


def _shares_update(exchanges: Iterable[Exchange]) -> bool:
    sent = reduced = 0.0
    for exchange in exchanges:
        if exchange.op == "broadcast":
            sent += exchange.bytes
        elif exchange.op == "all_gather":
            sent += exchange.bytes * exchange.ranks
        elif exchange.op in _REDUCING:
            reduced += exchange.bytes
    return reduced > 0 and sent >= _GOOD_PART * reduced


def _link(joined: Joined, steady: IntArray) -> Exchange | None:
    """Returns the mean traffic of a link in a steady step."""
    messages = joined.messages
    _, transfer = joined.wait_and_transfer()
    rows = np.flatnonzero(
        messages.op_is("recv") & (joined.partner != NULL) & in_steps(messages.step, steady)
    )
    rows = rows[transfer[rows] != NULL]
    if not len(rows):
        return None
    steps = max(len(steady), 1)
    size = np.maximum(messages.out_bytes[rows], messages.bytes[joined.partner[rows]])
    size = np.maximum(size, 0)
    links = len(np.unique(np.stack([messages.peer[rows], messages.rank[rows]]), axis=1).T)
    return Exchange(
        op="send",
        count=len(rows) / steps / links,
        bytes=float(size.sum()) / steps / links,
        largest=int(size.max()),
        transfer_us=float(transfer[rows].sum()) / 1e3 / steps / len(distinct(messages.rank[rows])),
        ranks=2,
    )


def _element_bytes(trace: Trace, scans: Mapping[int, RankScan], joined: Joined) -> float | None:
    """Bytes on the wire of one element of the gradients that messages carry."""
    for rank, scan in scans.items():
        messages = scan.messages
        size = np.where(messages.wire_bytes >= 0, messages.wire_bytes, messages.bytes)
        names = np.array([*messages.ops, ""])[messages.op]
        rows = np.flatnonzero((names == "all_reduce") & (messages.tensor_count > 0) & (size > 0))
        counts = {info.id: int(np.prod(info.shape)) for info in trace.tensors(rank)}
        if not len(rows) or not counts:
            continue
        first = np.cumsum(messages.tensor_count) - messages.tensor_count
        elements = np.zeros(max(counts) + 2)
        elements[list(counts)] = list(counts.values())
        known = np.where(messages.tensors < len(elements) - 1, messages.tensors, NULL)
        sums = np.append(0.0, np.cumsum(elements[known]))
        carried = sums[first[rows] + messages.tensor_count[rows]] - sums[first[rows]]
        if carried.sum() > 0:
            return float(size[rows].sum() / carried.sum())
    return None


def _merged_facts(parts: Sequence[tuple[float, JobFacts]]) -> JobFacts:
    """Properties of the job over all ranges."""
    facts = [each for _, each in parts]
    by_op: dict[tuple[str, bool], list[tuple[float, Exchange]]] = defaultdict(list)
    for weight, each in parts:
        for exchange in each.exchanges:
            by_op[exchange.op, exchange.gradients].append((weight, exchange))
    whole = sum(weight for weight, _ in parts)
    exchanges = [_merged_exchange(found, whole) for found in by_op.values()]
    links = [(weight, each.link) for weight, each in parts if each.link is not None]
    sharded = any(each.sharded for each in facts)
    return JobFacts(
        exchanges=tuple(sorted(exchanges, key=lambda exchange: -exchange.transfer_us)),
        sharded=sharded,
        replicated=not sharded and any(each.replicated for each in facts),
        buckets=any(each.buckets for each in facts),
        shares_update=any(each.shares_update for each in facts),
        element_bytes=next((each.element_bytes for each in facts if each.element_bytes), None),
        deepspeed=any(each.deepspeed for each in facts),
        update_names=tuple(dict.fromkeys(name for each in facts for name in each.update_names)),
        link=_merged_exchange(links, whole) if links else None,
        sends_in_a_row=sum(weight * each.sends_in_a_row for weight, each in parts) / whole,
    )


def _merged_exchange(parts: Sequence[tuple[float, Exchange]], whole: float) -> Exchange:
    """The exchanges of one operation, means over all steps."""

    def mean(name: str) -> float:
        return sum(weight * float(getattr(each, name)) for weight, each in parts) / whole

    return Exchange(
        op=parts[0][1].op,
        count=mean("count"),
        bytes=mean("bytes"),
        largest=max(each.largest for _, each in parts),
        transfer_us=mean("transfer_us"),
        ranks=max(each.ranks for _, each in parts),
        gradients=parts[0][1].gradients,
    )


FINDINGS: Final[Measure[JobFacts, tuple[Finding, ...]]] = Measure(
    "findings", lambda _: (), _facts, merged_together(_merged_facts), of="steady"
)
"""The properties of the job, on which its findings depend: `ddltrace.analyzer.findings` finds them
in the values of all other measures."""
