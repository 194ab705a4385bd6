"""Proposals to reduce the cost of a job's communication, with an upper bound of their savings.

Each proposal must be applicable to the job and not already applied. Its savings follow from the
fitted latency and bandwidth of the operation (`CostFit`), scaled by the share of the transfers for
which the steps wait. If there are too few sizes for a fit, the whole time of a message below 64 kB
counts as latency, and that of a larger message as bandwidth. Without the sizes of messages, nothing
is proposed that depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.formatting.units import bytes_text, share_text, time_text
from ddltrace.analyzer.measures.job_facts import Exchange, JobFacts, Wrapper
from ddltrace.analyzer.model import Analysis

SMALL_BYTES: Final = 64 << 10
"""Messages below this are paid for by their number more than by their size."""

_LEAST_UNFITTED: Final = 1 << 20
"""Where no latency was fitted, no smaller bucket than this is proposed."""


@dataclass(frozen=True)
class _Options:
    """How a library is told to apply a change.

    Attributes:
        merge: Larger messages.
        split: Smaller buckets; ``{megabytes}`` stands for their size.
        halve: Gradients in half precision.
        accumulate: Gradients over several batches.
        keep: Gathered parameters for the backward pass.
        prefetch: Parameters before they are needed.
    """

    merge: str = ""
    split: str = ""
    halve: str = ""
    accumulate: str = ""
    keep: str = ""
    prefetch: str = ""


_OPTIONS: Final[dict[Wrapper | None, _Options]] = {
    "ddp": _Options(
        merge=" (DDP: a larger bucket_cap_mb)",
        split="DDP: bucket_cap_mb={megabytes:.2g}",
        halve=" (bf16_compress_hook)",
        accumulate="no_sync, or local SGD",
    ),
    "fsdp": _Options(
        keep="FSDP2: reshard_after_forward=False; FSDP: SHARD_GRAD_OP",
        prefetch="FSDP2: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; "
        "FSDP: forward_prefetch=True",
    ),
    "deepspeed": _Options(
        merge=" (DeepSpeed: a larger reduce_bucket_size)",
        split="DeepSpeed: overlap_comm and a smaller reduce_bucket_size",
        halve=" (DeepSpeed: communication_data_type)",
        accumulate="DeepSpeed: gradient_accumulation_steps",
        keep="DeepSpeed: ZeRO stage 2, or a larger stage3_param_persistence_threshold",
        prefetch="DeepSpeed: overlap_comm and a larger stage3_prefetch_bucket_size",
    ),
    None: _Options(),
}

_PIECES: Final = (2, 4, 8, 16)
_FULL_PRECISION: Final = 3.5
"""Bytes of an element from which half precision would save anything."""
_LOW_OVERLAP: Final = 0.5
_PERIOD: Final = 4


@dataclass(frozen=True)
class Change:
    """What a proposal changes in the exchange of gradients, for an experiment that tests it.

    Attributes:
        kind: ``merge``, ``split``, ``halve`` or ``accumulate``.
        ranks: Number of ranks that exchange the gradients.
        amount: Of ``split``, MB of a bucket; of ``accumulate``, the number of batches.
    """

    kind: str
    ranks: int
    amount: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """One change.

    Attributes:
        advice: The proposed change, as one clause.
        saves_us: At most, of a step.
        change: The same for an experiment; None where none can test it.
    """

    advice: str
    saves_us: float
    change: Change | None = None


@dataclass(frozen=True)
class _Cost:
    """Transfer of one operation in a step: latency that its messages cost, and the rest."""

    latency_us: float
    moving_us: float
    fitted: bool

    @property
    def total_us(self) -> float:
        return self.latency_us + self.moving_us


def best_proposal(
    analysis: Analysis, facts: JobFacts, exposed_us: float, least_us: float
) -> Proposal:
    """Returns the change with the largest savings, or that no change is worthwhile.

    Args:
        analysis: The measured trace.
        facts: Properties of the job.
        exposed_us: Savings per step if transfers took no time.
        least_us: Minimum savings of a worthwhile change.
    """
    proposals = [
        proposal
        for exchange in facts.exchanges
        if exchange.ranks > 1
        for proposal in _of_exchange(analysis, facts, exchange, exposed_us)
    ]
    if facts.link is not None:
        proposals += _of_link(analysis, facts, facts.link, exposed_us)
    best = max(proposals, key=lambda proposal: proposal.saves_us, default=None)
    if best is not None and best.saves_us >= least_us:
        return best
    return _none_pays(analysis, facts, exposed_us)


def _of_exchange(
    analysis: Analysis, facts: JobFacts, exchange: Exchange, exposed_us: float
) -> Iterator[Proposal]:
    cost = _cost(analysis, exchange)
    whole = _whole(facts)
    if not whole or not cost.total_us:
        return
    # Of what steps wait for, the part that is this operation's, split as its transfers are.
    scale = exposed_us * exchange.transfer_us / whole / cost.total_us
    overlap = analysis.summary.overlap_ratio
    low = overlap is not None and overlap < _LOW_OVERLAP
    count = exchange.count
    options = _OPTIONS[facts.wrapper]
    by_size = "" if cost.fitted else ", by its size"
    if count >= 2 and exchange.bytes and exchange.gradients:
        each = cost.latency_us / count
        yield Proposal(
            f"merge messages{options.merge}: {count:.0f} {exchange.op} in each step "
            f"({bytes_text(round(exchange.bytes))} in all) pay a latency of "
            f"{time_text(each)} one by one{by_size}",
            (count - 1) * each * scale,
            Change("merge", exchange.ranks),
        )
    if facts.replicated and exchange.gradients and exchange.op == "all_reduce" and exchange.bytes:
        if low and cost.moving_us > cost.latency_us:
            yield from _split(exchange, cost, scale, facts)
        if facts.element_bytes is None or facts.element_bytes >= _FULL_PRECISION:
            unknown = ", if they are in full precision" if facts.element_bytes is None else ""
            yield Proposal(
                f"send less: gradients in half precision{options.halve} halve the "
                f"{bytes_text(round(exchange.bytes))} a step{unknown}",
                cost.moving_us / 2 * scale,
                Change("halve", exchange.ranks),
            )
    if facts.sharded and exchange.op == "all_gather":
        scatters = next((e.count for e in facts.exchanges if e.op == "reduce_scatter"), 0.0)
        if scatters and count >= 1.5 * scatters:
            yield Proposal(
                f"keep gathered parameters for the backward pass ({options.keep}), if memory "
                "allows: "
                f"{count:.0f} all_gathers a step serve {scatters:.0f} reduce_scatters",
                (count - scatters) / count * cost.total_us * scale,
            )
        if low:
            yield Proposal(
                f"gather parameters earlier ({options.prefetch}), so that compute hides the "
                "all_gathers",
                cost.total_us * scale,
            )


def _whole(facts: JobFacts) -> float:
    """All transfers of a step."""
    links = 0.0 if facts.link is None else facts.link.transfer_us
    return links + sum(each.transfer_us for each in facts.exchanges if each.ranks > 1)


def _of_link(
    analysis: Analysis, facts: JobFacts, link: Exchange, exposed_us: float
) -> Iterator[Proposal]:
    """Returns the possible savings for sends and receives."""
    cost, whole = _cost(analysis, link), _whole(facts)
    if not whole or not cost.total_us:
        return
    mine = exposed_us * link.transfer_us / whole
    latency = mine * cost.latency_us / cost.total_us
    size = bytes_text(round(link.bytes / link.count))
    overlap = analysis.summary.overlap_ratio
    # Microbatches follow each other, too, and cannot be merged.
    if facts.sends_in_a_row and not analysis.pipelines and link.bytes:
        yield Proposal(
            f"merge messages: a link carries {link.count:.0f} of {size} in each step, of whose "
            f"transfer {share_text(cost.latency_us / cost.total_us)} is latency; send what goes to "
            "one rank at a time in one message",
            latency * facts.sends_in_a_row,
        )
    if overlap is not None and overlap < _LOW_OVERLAP:
        # A first message has nothing to hide behind.
        yield Proposal(
            "receive ahead: post irecv for the next message before the work on this one, and "
            "isend in place of send, so that compute hides the transfers",
            mine * (1 - 1 / max(link.count, 1.0)),
        )
    if not link.bytes:
        return
    yield Proposal(
        f"send less: activations and gradients in half precision halve the messages of {size}, "
        "if they are in full precision",
        (mine - latency) / 2,
    )


def _split(exchange: Exchange, cost: _Cost, scale: float, facts: JobFacts) -> Iterator[Proposal]:
    """Smaller buckets: all but the last move while backward still computes."""
    count = max(exchange.count, 1.0)
    latency = cost.latency_us / count
    least = SMALL_BYTES if cost.fitted else _LEAST_UNFITTED
    left = [
        (cost.moving_us / (count * pieces) + latency + (pieces - 1) * count * latency, pieces)
        for pieces in _PIECES
        if exchange.bytes / (count * pieces) >= least
    ]
    if not left:
        return
    remaining, pieces = min(left)
    size = max(round(exchange.bytes / (count * pieces)), 1)
    megabytes = max(size / 2**20, 0.01)
    options = _OPTIONS[facts.wrapper]
    how = f" ({options.split.format(megabytes=megabytes)})" if options.split else ""
    yield Proposal(
        f"start sending earlier, in smaller buckets of about {bytes_text(size)}{how}: only the "
        "last one then follows the backward pass",
        max(cost.total_us - remaining, 0.0) * scale,
        Change("split", exchange.ranks, megabytes),
    )


def _none_pays(analysis: Analysis, facts: JobFacts, exposed_us: float) -> Proposal:
    main = next((each for each in facts.exchanges if each.ranks > 1), None)
    if main is None or (facts.link and facts.link.transfer_us > main.transfer_us):
        main = facts.link
    if main is None:
        return Proposal("no change of this job's messages pays; a faster link would", exposed_us)
    if not main.bytes:
        return Proposal(
            "a faster link: the trace does not have the messages' sizes, so that nothing else can "
            "be judged",
            exposed_us,
        )
    cost = _cost(analysis, main)
    share = cost.latency_us / cost.total_us if cost.total_us else 0.0
    per_step = f"{main.count:.0f} {main.op} a step ({bytes_text(round(main.bytes))} in all)"
    why = f"it is not known how much of the time of the {per_step} is latency"
    if cost.fitted:
        why = f"of the time of the {per_step}, {share_text(share)} is latency"
    if not (facts.replicated and main.gradients):
        return Proposal(f"a faster link, or fewer exchanges: {why}", exposed_us)
    options = _OPTIONS[facts.wrapper]
    how = f" ({options.accumulate})" if options.accumulate else ""
    return Proposal(
        f"exchange gradients less often, by accumulating them over several batches{how}: {why}",
        exposed_us * (1 - 1 / _PERIOD),
        Change("accumulate", main.ranks, _PERIOD),
    )


def _cost(analysis: Analysis, exchange: Exchange) -> _Cost:
    """Returns the part of an operation's transfers in a step that is due to latency."""
    total = exchange.transfer_us
    for fit in analysis.cost_fits:
        if fit.src is not None or fit.verdict != "fitted":
            continue
        if (fit.op, fit.group_size) == (exchange.op, exchange.ranks):
            each = fit.latency_us or 0.0
            mean = exchange.bytes / exchange.count
            slope = 8 / (fit.algbw_gbps * 1e3) if fit.algbw_gbps else 0.0
            # As the model shares one message of mean size; transfers may be longer than it says.
            part = each / (each + slope * mean) if each + slope * mean else 1.0
            return _Cost(total * part, total * (1 - part), fitted=True)
    mean = exchange.bytes / exchange.count if exchange.count else 0.0
    if mean < SMALL_BYTES:
        return _Cost(total, 0.0, fitted=False)
    return _Cost(0.0, total, fitted=False)
