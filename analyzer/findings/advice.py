"""Findings: possible changes, an upper bound of their savings per step, and commands to test them.

Every finding is based on a number of the analysis. Its savings are an upper bound from a replay of
the steady steps without the cause (`Savings`), as a mean per step, like the step time.

Every finding has a command that tests it: an experiment with the job under other strategies, if the
advice is a strategy; otherwise another recording of the job after the change, and its comparison
with this trace. A job that was recorded with another tool is recorded again with that tool.

A proposal on communication must be applicable to the job and not already applied. Its savings
follow from the fitted latency and bandwidth of the operation (`CostFit`), scaled by the share of
the transfers for which the steps wait. If there are too few sizes for a fit, the whole time of a
message below 64 kB counts as latency, and that of a larger message as bandwidth. Without the sizes
of messages, nothing is proposed that depends on them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ddltrace.analyzer.events.copies import DIRECTIONS
from ddltrace.analyzer.events.process_stops import STOPPED
from ddltrace.analyzer.events.rank_timeline import CATEGORIES
from ddltrace.analyzer.formatting.text_table import shorten
from ddltrace.analyzer.formatting.units import (
    bandwidth_text,
    bytes_text,
    printable,
    share_text,
    time_text,
)
from ddltrace.analyzer.measures.connections import slow_connections
from ddltrace.analyzer.measures.device_queues import LaunchGaps
from ddltrace.analyzer.measures.finding import Finding
from ddltrace.analyzer.measures.job_facts import Exchange, JobFacts, Wrapper
from ddltrace.analyzer.measures.path_parts import PathPart
from ddltrace.analyzer.measures.resources import worst_throttled
from ddltrace.analyzer.measures.root_causes import RootCause
from ddltrace.analyzer.measures.savings import Savings
from ddltrace.analyzer.measures.stragglers import StragglerRow, delays_others
from ddltrace.analyzer.model import Analysis
from ddltrace.tracer.extensions import extension
from ddltrace.tracer.masked_command import MASK, is_masked
from ddltrace.tracer.number_text import counted
from ddltrace.tracer.storage.location import Location

SMALL_BYTES: Final = 64 << 10
"""Messages below this are paid for by their number more than by their size."""

_LEAST_UNFITTED: Final = 1 << 20
"""Where no latency was fitted, no smaller bucket than this is proposed."""


_OPTIONS: Final[dict[tuple[Wrapper | None, str], str]] = {
    ("ddp", "merge"): " (DDP: a larger bucket_cap_mb)",
    ("ddp", "split"): "DDP: bucket_cap_mb={megabytes:.2g}",
    ("ddp", "halve"): " (bf16_compress_hook)",
    ("ddp", "accumulate"): "no_sync, or local SGD",
    ("fsdp", "keep"): "FSDP2: reshard_after_forward=False; FSDP: SHARD_GRAD_OP",
    ("fsdp", "prefetch"): (
        "FSDP2: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; "
        "FSDP: forward_prefetch=True"
    ),
    ("deepspeed", "merge"): " (DeepSpeed: a larger reduce_bucket_size)",
    ("deepspeed", "split"): "DeepSpeed: overlap_comm and a smaller reduce_bucket_size",
    ("deepspeed", "halve"): " (DeepSpeed: communication_data_type)",
    ("deepspeed", "accumulate"): "DeepSpeed: gradient_accumulation_steps",
    ("deepspeed", "keep"): (
        "DeepSpeed: ZeRO stage 2, or a larger stage3_param_persistence_threshold"
    ),
    ("deepspeed", "prefetch"): ("DeepSpeed: overlap_comm and a larger stage3_prefetch_bucket_size"),
}
"""How a library is told to merge messages, split buckets, send gradients in half precision or over
several batches, keep gathered parameters for the backward pass, or gather them before."""


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
    merge, halve, keep, prefetch = (
        _OPTIONS.get((facts.wrapper, change), "")
        for change in ("merge", "halve", "keep", "prefetch")
    )
    by_size = "" if cost.fitted else " (assumed, as messages are small)"
    if count >= 2 and exchange.bytes and exchange.gradients:
        each = cost.latency_us / count
        yield Proposal(
            f"merge messages{merge}: each of the {count:.0f} {exchange.op} a step "
            f"({bytes_text(round(exchange.bytes))} in total) costs a latency of "
            f"{time_text(each)}{by_size}",
            (count - 1) * each * scale,
            Change("merge", exchange.ranks),
        )
    if facts.replicated and exchange.gradients and exchange.op == "all_reduce" and exchange.bytes:
        if low and cost.moving_us > cost.latency_us:
            yield from _split(exchange, cost, scale, facts)
        if facts.element_bytes is None or facts.element_bytes >= _FULL_PRECISION:
            unknown = ", if they are in full precision" if facts.element_bytes is None else ""
            yield Proposal(
                f"send gradients in half precision{halve}: this halves the "
                f"{bytes_text(round(exchange.bytes))} a step{unknown}",
                cost.moving_us / 2 * scale,
                Change("halve", exchange.ranks),
            )
    if facts.sharded and exchange.op == "all_gather":
        scatters = next((e.count for e in facts.exchanges if e.op == "reduce_scatter"), 0.0)
        if scatters and count >= 1.5 * scatters:
            yield Proposal(
                f"keep gathered parameters for the backward pass ({keep}), if memory allows: there "
                f"are {count:.0f} all_gathers a step for {scatters:.0f} reduce_scatters",
                (count - scatters) / count * cost.total_us * scale,
            )
        if low:
            yield Proposal(
                f"gather parameters earlier ({prefetch}), so that compute hides the all_gathers",
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
            f"merge messages: a link carries {link.count:.0f} of {size} a step, and latency is "
            f"{share_text(cost.latency_us / cost.total_us)} of their transfer; send what goes to "
            "one rank at the same time in one message",
            latency * facts.sends_in_a_row,
        )
    if overlap is not None and overlap < _LOW_OVERLAP:
        # A first message has nothing to hide behind.
        yield Proposal(
            "post irecv for the next message before the work on this one, and use isend instead "
            "of send, so that compute hides the transfers",
            mine * (1 - 1 / max(link.count, 1.0)),
        )
    if not link.bytes:
        return
    yield Proposal(
        f"send activations and gradients in half precision: this halves the messages of {size}, "
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
    option = _OPTIONS.get((facts.wrapper, "split"), "").format(megabytes=megabytes)
    how = f" ({option})" if option else ""
    yield Proposal(
        f"start sending earlier, in smaller buckets of about {bytes_text(size)}{how}: then only "
        "the last one follows the backward pass",
        max(cost.total_us - remaining, 0.0) * scale,
        Change("split", exchange.ranks, megabytes),
    )


def _none_pays(analysis: Analysis, facts: JobFacts, exposed_us: float) -> Proposal:
    main = next((each for each in facts.exchanges if each.ranks > 1), None)
    if main is None or (facts.link and facts.link.transfer_us > main.transfer_us):
        main = facts.link
    if main is None:
        return Proposal(
            "use a faster link: ddltrace knows no change of this job's messages that would help",
            exposed_us,
        )
    if not main.bytes:
        return Proposal(
            "use a faster link: the trace lacks the sizes of messages, without which other changes "
            "cannot be judged",
            exposed_us,
        )
    cost = _cost(analysis, main)
    share = cost.latency_us / cost.total_us if cost.total_us else 0.0
    per_step = f"{main.count:.0f} {main.op} a step ({bytes_text(round(main.bytes))} in total)"
    why = f"how much of the transfer of {per_step} is latency is not known"
    if cost.fitted:
        why = f"{share_text(share)} of the transfer of {per_step} is latency"
    if not (facts.replicated and main.gradients):
        return Proposal(f"use a faster link, or communicate less often: {why}", exposed_us)
    option = _OPTIONS.get((facts.wrapper, "accumulate"))
    how = f" ({option})" if option else ""
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


_MIN_THROTTLED: Final = 0.1
_MIN_BUSY: Final = 0.5
_MIN_WAIT: Final = 0.05
_MEMORY_OF: Final = {
    "process_memory": "the memory of its process",
    "device_allocated_peak": "the peak of allocated device memory in a step",
}
_MEMORY_FIXES: Final = {
    "process_memory": (
        "look for objects that live longer than a step: losses kept with their graph (append "
        "loss.item(), not loss), caches without a limit, data loader workers that copy a dataset"
    ),
    "device_allocated_peak": (
        "look for tensors kept from step to step: losses with their graph (append loss.item(), not "
        "loss), outputs in a list; torch.cuda.memory._record_memory_history shows where they "
        "were allocated"
    ),
}


def resource_findings(analysis: Analysis) -> Iterator[Finding]:
    """The findings that resource counters give; of most, the savings are not known."""
    yield from _stopped_processes(analysis)
    yield from _growing_memory(analysis)
    yield from _throttled_device(analysis)
    yield from _busy_hosts(analysis)


def _stopped_processes(analysis: Analysis) -> Iterator[Finding]:
    """One finding: the process that stood still for longest, and how many others did."""
    stopped = [(stop, row.rank) for row in analysis.resources for stop in row.stops or ()]
    if not stopped:
        return
    stop, rank = max(stopped, key=lambda pair: pair[0].least_us)
    others = len({number for _, number in stopped} - {rank})
    more = f"; {counted(others, 'more rank', 'was')} stopped as well" if others else ""
    until = "" if stop.last_step is None else f", until step {stop.last_step}"
    # What a mean step loses by stops on its critical path.
    saves = sum(part.alone_us for part in analysis.critical_path if part.name == STOPPED)
    step_us = 0.0 if analysis.savings is None else analysis.savings.step_us
    yield Finding(
        "stopped",
        saves,
        saves / step_us if step_us else 0.0,
        f"no thread of rank {rank} ran for {time_text(stop.least_us)} to "
        f"{time_text(stop.most_us)}{until}: its counters, due every second, are missing, and in "
        "that time its process used no more processor time than it usually does in a second and "
        f"did not wait for a processor{more}",
        "find what stopped the process, or suspended it: SIGSTOP (kill -STOP, a batch system that "
        "preempts), a debugger, a frozen container or virtual machine; or a call that waits "
        "without releasing Python's lock",
    )


def _growing_memory(analysis: Analysis) -> Iterator[Finding]:
    """One finding per counter: the rank whose memory grows most, and how many others do."""
    for counter, what in _MEMORY_OF.items():
        growing = [
            (growth, row.rank)
            for row in analysis.resources
            for growth in row.growth
            if growth.counter == counter
        ]
        if not growing:
            continue
        growth, rank = max(growing, key=lambda pair: pair[0].bytes_per_step)
        more = len(growing) - 1
        others = f", and on {counted(more, 'other rank')}" if more else ""
        yield Finding(
            "memory",
            0.0,
            0.0,
            f"{what} grows on rank {rank}{others}: by {bytes_text(growth.bytes_per_step)} a step, "
            f"{bytes_text(growth.bytes)} from step {growth.first_step} to {growth.last_step}",
            _MEMORY_FIXES[counter],
        )


def _throttled_device(analysis: Analysis) -> Iterator[Finding]:
    row = worst_throttled(analysis.resources)
    if row is None or (row.device_throttled_share or 0.0) < _MIN_THROTTLED:
        return
    count = sum((r.device_throttled_share or 0.0) >= _MIN_THROTTLED for r in analysis.resources)
    others = "" if count == 1 else f"; {counted(count, 'rank', 'is')} affected"
    yield Finding(
        "device",
        0.0,
        0.0,
        f"the clock of rank {row.rank}'s device was reduced in "
        f"{share_text(row.device_throttled_share or 0.0)} of the samples "
        f"({', '.join(row.device_throttling)}){others}",
        "look at the device's cooling, its power limit (nvidia-smi -q -d POWER,TEMPERATURE) and "
        "what else runs on it",
    )


def _busy_hosts(analysis: Analysis) -> Iterator[Finding]:
    """One finding: the host without a free processor whose ranks wait longest for one."""
    busy = [
        row
        for row in analysis.resources
        if (row.host_busy_share or 0.0) >= _MIN_BUSY
        and (row.cpu_wait_share is None or row.cpu_wait_share >= _MIN_WAIT)
    ]
    if not busy:
        return
    row = max(busy, key=lambda row: row.cpu_wait_share or 0.0)
    others = len({each.host for each in busy}) - 1
    more = f"; {counted(others, 'more host')} had none" if others else ""
    waits, mean = "", analysis.summary.step_us.mean
    if row.cpu_wait_share is not None:
        of_step = (
            "" if mean is None else f" ({time_text(row.cpu_wait_share * mean)} of a mean step)"
        )
        waits = (
            f"; the main thread of rank {row.rank} waited for one during "
            f"{share_text(row.cpu_wait_share)} of the time{of_step}"
        )
    yield Finding(
        "processors",
        0.0,
        0.0,
        f"host {printable(row.host)} had no free processor (95 % busy) in "
        f"{share_text(row.host_busy_share or 0.0)} of the samples{waits}{more}; the cost is not "
        "known, and all other numbers depend on this load",
        "start fewer threads (OMP_NUM_THREADS, data loader workers) or fewer ranks on such a "
        "host, or move other work off it",
    )


_MIN_SHARE: Final = 0.02
"""Findings that could save less than this part of a step are left out."""

_MAX_NAME: Final = 60

_FIXES: Final = {
    "compute": "give that rank less work, or look for what slows its device",
    "data": "give its data loader more workers, or look at where it reads from",
    "copy": "compare what that rank copies from and to its device with the other ranks",
    "host": "compare its host code with that of the other ranks",
    "update": "compare its optimizer's work with that of the other ranks",
    "unrecorded": "record the host as well, to see what that rank does in that time",
    "stopped": "find what stopped its process, or suspended it (see the finding on it)",
    "network": "look at that rank's own link: its port, its route, what else uses them",
    None: "look at what that rank does before it enters collectives",
}
_FIX_OF_COLLECTIONS: Final = (
    "keep Python's garbage collector out of the steps: gc.freeze() when the model is built, or "
    "gc.disable(), and gc.collect() on all ranks in the same step, such as every 1,000 steps"
)
_COPIES: Final = {
    "host_to_device": "from host to device",
    "device_to_host": "from device to host",
    "device_to_device": "within the device",
    "peer": "from device to device",
    "fill": "fills",
    "other": "of unknown direction",
}
_COPY_FIXES: Final = {
    "host_to_device": (
        "copy the next batch while this one computes: DataLoader(pin_memory=True) and "
        ".to(device, non_blocking=True)"
    ),
    "device_to_host": (
        "keep results on the device: .item(), .cpu() and printing a tensor copy it to the host; "
        "do so every N steps, or copy into pinned memory with non_blocking=True"
    ),
    "device_to_device": (
        "look for .clone(), .contiguous(), torch.cat and gradients copied into buckets (DDP: "
        "gradient_as_bucket_view=True)"
    ),
    "peer": (
        "look for tensors that a process moves between its devices, and whether these are linked "
        "directly (NVLink)"
    ),
    "fill": "use zero_grad(set_to_none=True), and torch.empty where all values are overwritten",
    "other": "look at the largest copies in the table of the critical path's parts",
}
_LINK_FIX: Final = "look at the link between these ranks: its port, its route, what else uses it"
_RECORD_ALL: Final = (
    "record all ranks: without all ranks of a message, its transfer cannot be told from "
    "waiting for another rank"
)
_SHOWN_CAUSES: Final = 2
_MOST: Final = 0.5
_MUCH: Final = 0.1
_MANY_LAUNCHES: Final = 50
"""In a step: fewer do not keep a host busy."""

_FIX_ON_ONE_HOST: Final = (
    "look for what takes its core from that rank's communication: other work on the host, more "
    "threads than cores (OMP_NUM_THREADS)"
)


def find_findings(
    analysis: Analysis, facts: JobFacts, path: Location | None = None
) -> tuple[Finding, ...]:
    """All findings of an analysis: a considerable fault of one rank first, then by their savings.

    Args:
        analysis: The measured trace.
        facts: Properties of the job.
        path: Where the trace is, to compare another with it; None if it is in several places.
    """
    again = _again(analysis, path)
    resources = [replace(finding, command=again) for finding in resource_findings(analysis)]
    savings = analysis.savings
    if savings is None or not savings.step_us:
        return tuple(resources)
    held = path_shares(analysis)
    found = [
        *_communication(analysis, facts, savings, held),
        *_network(analysis, savings),
        *_pipelines(analysis, savings),
        *_straggler(analysis, savings),
        *_host(analysis, facts, savings, held),
        *_data(analysis, savings, held),
        *_copy(analysis, savings, held),
        *_update(analysis, facts, savings, held),
        *_compute(analysis, savings, held),
    ]
    worth = [
        replace(finding, command=finding.command or again)
        for finding in found
        if finding.share >= _MIN_SHARE
    ]
    worth.sort(key=lambda finding: -finding.saves_us)
    # What one rank does differently also counts in what all ranks share.
    of_rank = [finding for finding in worth if finding.rank is not None and finding.share >= _MUCH]
    shared = [finding for finding in worth if finding not in of_rank]
    # Their savings are unknown, so they come last, except for what makes all others unsure.
    stopped_us = sum(stop.least_us for row in analysis.resources for stop in row.stops or ())
    stood_still = stopped_us >= _MIN_SHARE * sum(row.wall_us for row in analysis.steps)
    stopped = [finding for finding in resources if finding.kind == "stopped" and stood_still]
    busy = [finding for finding in resources if finding.kind == "processors"]
    others = [finding for finding in resources if finding not in (*stopped, *busy)]
    return (*stopped, *of_rank, *busy, *shared, *others)


def path_shares(analysis: Analysis) -> dict[str, float]:
    """Category -> its share of the critical paths of the steady steps; they sum to 1."""
    rows = [row.critical_path for row in analysis.steps if row.steady]
    total = sum(row.total_us for row in rows)
    if not total:
        return {}
    return {name: sum(getattr(row, f"{name}_us") for row in rows) / total for name in CATEGORIES}


def _communication(
    analysis: Analysis, facts: JobFacts, savings: Savings, held: dict[str, float]
) -> Iterable[Finding]:
    exposed = savings.transfer_us
    if not exposed:
        return
    proposal = best_proposal(analysis, facts, exposed, _MIN_SHARE * savings.step_us)
    share = held["transfer"]
    top = _largest(analysis, "transfer")
    part = ""
    if top is not None and share:
        part = f", {share_text(top.share / share)} of it {_named(top)}"
    overlap = analysis.summary.overlap_ratio
    hidden = "" if overlap is None else f"; compute hides {share_text(overlap)} of communication"
    # Sorted by their total transfer.
    main = next((row for row in analysis.collectives if row.transfer_us_total is not None), None)
    evidence = f"{share_text(share)} of the critical path is transfer{part}{hidden}"
    if held["wait"] > share:
        evidence += (
            f"; {share_text(held['wait'])} is unexplained waiting, part of which may be transfer"
        )
    if main is None and facts.link is None:
        proposal = replace(proposal, advice=_RECORD_ALL, change=None)
    strategies = _strategies(analysis, facts, proposal.change)
    yield _finding(
        savings,
        "communication",
        min(proposal.saves_us, exposed),
        evidence,
        proposal.advice,
        command=experiment_command(analysis, strategies),
        strategies=strategies,
        unsure=main is not None and main.unsure,
    )


def _network(analysis: Analysis, savings: Savings) -> Iterable[Finding]:
    """One finding on the slow TCP connections between hosts."""
    slow = slow_connections(analysis.connections)
    if slow is None or not savings.transfer_us:
        return
    worst, others = slow.rows[0], len(slow.rows) - 1
    more = f", and {others} more of {len(analysis.connections)} are slow" if others else ""
    host = None if slow.host is None else printable(slow.host)
    common = f"; host {host} is an end of all of them" if others and host else ""
    yield _finding(
        savings,
        "network",
        savings.transfer_us,
        f"the connection from {printable(worst.src_host)} to {printable(worst.dst_host)} (ranks "
        f"{worst.src} and {worst.dst}) carries {bandwidth_text(worst.rate_gbps)} while it has "
        f"bytes to send, others {bandwidth_text(slow.usual_gbps)}{more}{common}; the saving is "
        "what a step without any transfer would save",
        f"measure the link{f' of {host}' if host else ''} without the job (iperf3), and compare "
        "its speed (ethtool), errors (ip -s link) and switch port with those of the others",
    )


def _finding(
    savings: Savings,
    kind: str,
    saves_us: float,
    evidence: str,
    advice: str,
    *,
    command: str | None = None,
    unsure: bool = False,
    strategies: tuple[str, ...] = (),
    rank: int | None = None,
) -> Finding:
    return Finding(
        kind=kind,
        saves_us=saves_us,
        share=saves_us / savings.step_us,
        evidence=evidence,
        advice=advice,
        command=command,
        unsure=unsure,
        strategies=strategies,
        rank=rank,
    )


def _straggler(analysis: Analysis, savings: Savings) -> Iterable[Finding]:
    ideal = _slower_than_ideal(analysis, savings)
    if ideal is not None:
        yield ideal
        return
    # Those without which a step would be shorter.
    causes = sorted(
        (cause for cause in analysis.root_causes if cause.most_us), key=lambda cause: -cause.most_us
    )
    if analysis.waiting.is_point_to_point:
        yield from (_root_cause(analysis, savings, cause) for cause in causes[:_SHOWN_CAUSES])
        return
    share = analysis.summary.sync_overhead_share
    if not share or not analysis.stragglers:
        return
    worst = analysis.stragglers[0]
    culprit = delays_others(analysis.stragglers, len(analysis.trace.ranks))
    # Who comes last to most collectives may itself have waited, for a rank that comes last to few.
    own = [cause for cause in causes if cause.activity != "transfer" and cause.peer is None]
    least = max(_MUCH * savings.step_us, _MOST * savings.imbalance_us)
    if own and own[0].most_us >= least and (culprit is None or culprit.rank != own[0].rank):
        culprit = next((row for row in analysis.stragglers if row.rank == own[0].rank), None)
    if own and own[0].most_us >= least and (culprit is None or culprit.cause is None):
        yield _root_cause(analysis, savings, own[0])
        return
    if culprit is None or culprit.saves_us is None:
        saves = savings.imbalance_us
        rank = None
        how = (
            f"no single rank delays the others: rank {worst.rank}, with the largest total "
            f"lateness, enters {share_text(worst.share)} of its collectives last"
        )
        how += _collections(analysis)
        advice = (
            "look for what varies between ranks and between steps, such as lengths of inputs, "
            "garbage collection, other work on the machines"
        )
    else:
        # The fix concerns the cause only: no more than all time of that kind can be saved.
        kind = "transfer" if culprit.cause == "network" else culprit.cause
        saves = min(culprit.saves_us, getattr(savings, f"{kind}_us", culprit.saves_us))
        rank = culprit.rank
        how = f"rank {culprit.rank} is {_lateness(analysis, culprit)}"
        advice = _fix(analysis, culprit)
    yield _finding(
        savings,
        "straggler",
        saves,
        f"on average, a rank spends {share_text(share)} of a step waiting for others without "
        f"computing; {how}",
        advice,
        unsure=worst.unsure,
        rank=rank,
    )


def _slower_than_ideal(analysis: Analysis, savings: Savings) -> Finding | None:
    """What stragglers cost by the replay of the ideal job, where there is one."""
    ideal = analysis.ideal_job
    if ideal is None:
        return None
    saves = min(max(ideal.replayed_us - ideal.ideal_us, 0.0), savings.step_us)
    workers, last_stage = ideal.m_w or 0.0, ideal.m_s or 0.0
    if max(workers, last_stage) < _MOST:
        advice = (
            "balance what varies between microbatches, such as lengths of sequences: neither few "
            "slow ranks nor a slow last stage explain most of it"
        )
    elif workers >= last_stage:
        ranks = " and ".join(f"rank {rank}" for rank in ideal.slowest_ranks)
        advice = (
            f"look for what slows {shorten(ranks, _MAX_NAME)}: with ideal times there, "
            f"{share_text(min(workers, 1.0))} of it is gone"
        )
    else:
        advice = (
            "give the last stage of the pipeline fewer layers (it also computes the loss): with "
            f"ideal times there, {share_text(min(last_stage, 1.0))} of it is gone"
        )
    return _finding(
        savings,
        "straggler",
        saves * min(max(workers, last_stage, 0.0), 1.0)
        if max(workers, last_stage) >= _MOST
        else saves,
        f"stragglers slow the job by {share_text(ideal.slowdown - 1)}, compared with a job in "
        "which all operations of one type take equally long",
        advice,
    )


def _pipelines(analysis: Analysis, savings: Savings) -> Iterable[Finding]:
    """More microbatches fill the bubbles of a pipeline."""
    for pipeline in analysis.pipelines[:1]:
        stages, count = len(pipeline.stages), pipeline.microbatches
        if not count:
            continue
        # Of m + p - 1 turns of the slowest stage, p - 1 are bubble; half of that with 2 m.
        slowest = max(pipeline.stages, key=lambda stage: stage.work_us)
        # The step cannot get shorter than what the slowest stage works.
        saves = min(slowest.work_us / count * (stages - 1) / 2, slowest.bubble_us)
        fit = next((fit for fit in analysis.cost_fits if fit.op == "send"), None)
        latency = 0.0 if fit is None or fit.latency_us is None else fit.latency_us
        yield _finding(
            savings,
            "pipeline",
            min(max(saves - count * latency, 0.0), savings.step_us),
            f"bubbles take {share_text(pipeline.bubble_share)} of the time of the pipeline's "
            f"stages; {count} microbatches on {stages} equal stages without transfers would have "
            f"{share_text(pipeline.ideal_share)}",
            f"use more microbatches ({2 * count} would halve the time in which the pipeline fills "
            "and drains), or interleave several stages on each rank",
        )


def _root_cause(analysis: Analysis, savings: Savings, cause: RootCause) -> Finding:
    """The finding on a cause of waiting."""
    waiting = cause.direct_us + cause.propagated_us
    evidence = f"ranks wait {time_text(waiting)} a step in total, because {root_cause_text(cause)}"
    if cause.peer is not None and cause.slower_us > waiting:
        evidence = (
            f"{root_cause_text(cause)}: blocked receives last {time_text(cause.slower_us)} a "
            "step longer"
        )
    if cause.propagated_us:
        evidence += f"; {time_text(cause.propagated_us)} of it is propagated by other ranks"
    if cause.saves_range_us is not None:
        evidence += (
            f"; without that, a step is {time_text(cause.saves_range_us[0])} to "
            f"{time_text(cause.saves_range_us[1])} shorter, depending on what ranks do in "
            "unexplained time"
        )
    advice = (
        _LINK_FIX
        if cause.peer is not None
        else _FIXES["network" if cause.activity == "transfer" else cause.activity]
    )
    if cause.activity == "compute" and analysis.pipelines:
        advice += "; in a pipeline, move layers from its stage to others"
    # Of a link, no single rank is at fault.
    rank = cause.rank if cause.peer is None and cause.activity != "transfer" else None
    return _finding(savings, "straggler", cause.most_us, evidence, advice, rank=rank)


def root_cause_text(cause: RootCause) -> str:
    """Describes a root cause as a clause. Safe to print."""
    if cause.peer is not None:
        return f"messages from rank {cause.peer} to rank {cause.rank} take longer than others"
    if cause.activity == "transfer":
        return f"rank {cause.rank} spends longer in other transfers than the ranks that wait"
    if cause.activity == "unrecorded":
        return f"rank {cause.rank} has more unrecorded time than the ranks that wait"
    if cause.activity == "stopped":
        return f"the process of rank {cause.rank} was stopped"
    name = "" if cause.name is None else f" ({shorten(printable(cause.name), _MAX_NAME)})"
    return f"{cause.activity}{name} on rank {cause.rank} takes longer than on the ranks that wait"


def share_of_collectives(share: float) -> str:
    """The collectives that a rank enters last, of all in which it takes part."""
    return "every collective" if share == 1.0 else f"{share_text(share)} of its collectives"


def _lateness(analysis: Analysis, row: StragglerRow) -> str:
    how = (
        f"the last to enter {share_of_collectives(row.share)}, "
        f"{time_text(row.lateness_us)} after the others (median)"
    )
    if row.sometimes:
        how = f"late mainly in {row.late_steps} of {analysis.summary.steps} steps"
        how += f", by {time_text(row.late_step_us)} (median)"
    if row.cause is None:
        return how
    if row.cause == "stopped":
        return f"{how}: its process was stopped"
    cause, longer = cause_text(analysis, row), time_text(row.cause_us)
    when = "in such a step" if row.sometimes else "a step"
    of_it = collections_text(row)
    return f"{how}; its {cause} takes {longer} longer {when} than on the others{of_it}"


def _collections(analysis: Analysis) -> str:
    """How long ranks collect garbage, if that is much."""
    times = [row.gc_us for row in analysis.ranks if row.gc_us is not None]
    summary = analysis.summary
    taken = len(times) * summary.steps * (summary.rank_step_us.mean or 0.0)
    if not taken or sum(times) < _MIN_SHARE * taken:
        return ""
    return f"; Python's garbage collector takes {share_text(sum(times) / taken)} of a rank's step"


def collections_text(row: StragglerRow) -> str:
    """Says that most of a late rank's extra time is garbage collection, if it is."""
    return ", most of it in Python's garbage collector" if row.is_garbage_collection else ""


def cause_text(analysis: Analysis, row: StragglerRow) -> str | None:
    """Describes which activity takes longer on a late rank; None if it is not known."""
    if row.cause == "data":
        return "data loading"
    if row.cause != "network":
        return row.cause
    return "own transfer" if _on_one_host(analysis) else "own network"


def _fix(analysis: Analysis, row: StragglerRow) -> str:
    if row.cause == "network" and _on_one_host(analysis):
        return _FIX_ON_ONE_HOST
    return _FIX_OF_COLLECTIONS if row.is_garbage_collection else _FIXES[row.cause]


def _on_one_host(analysis: Analysis) -> bool:
    return len(analysis.trace.hosts) == 1


def _host(
    analysis: Analysis, facts: JobFacts, savings: Savings, held: dict[str, float]
) -> Iterable[Finding]:
    gaps = analysis.launch_gaps
    inside = 0.0 if gaps is None else gaps.in_phase_share_of_host or 0.0
    if gaps is None:
        where = " outside forward, backward, optimizer and data loading"
    else:
        where = f", {share_text(inside)} of it inside forward, backward and optimizer spans"
        where = where if inside else ""
    evidence = (
        f"{share_text(held['host'])} of the critical path is host code{where}"
        f"{_where(analysis, 'host')}"
    )
    if gaps is not None and _is_launch_bound(gaps):
        evidence = (
            f"the job is launch-bound: {evidence}; the device idles "
            f"{share_text(gaps.gap_share)} of the time in gaps of up to 1 ms, until the host "
            f"launches the next of {gaps.launches:,.0f} kernels and copies a step "
            f"({gaps.launches_per_s:,.0f} a second)"
        )
        optimizer = "" if _is_fused(facts) else ", use the optimizer's fused=True"
        advice = (
            "launch fewer kernels: fuse them with torch.compile, launch many at once with CUDA "
            'graphs (torch.compile(mode="reduce-overhead"), torch.cuda.graph)'
            f"{optimizer}, or use larger batches"
        )
    else:
        record = "" if analysis.trace.source == "ddltrace" else "record it with ddltrace run and "
        what = "logging, checkpoints or sleeps between steps"
        if inside >= _MOST:
            what = "Python code, logging or synchronization that delays launches"
        advice = f"look for {what}; {record}mark regions with ddltrace.annotate to see which"
    if gaps is not None and gaps.synchronizations >= 1:
        advice += (
            "; look for .item(), .cpu() and printed tensors: in "
            f"{gaps.synchronizations:,.1f} calls a step, the host waits for the device"
        )
    yield _finding(savings, "host", savings.host_us, evidence, advice)


def _is_launch_bound(gaps: LaunchGaps) -> bool:
    """Whether most of the time in which devices idle for the host is between many launches."""
    often = gaps.launches >= _MANY_LAUNCHES and gaps.gap_share >= _MUCH
    return often and (gaps.gap_share_of_host or 0.0) >= _MOST


def _is_fused(facts: JobFacts) -> bool:
    return any("fused" in name for name in facts.update_names)


def _data(analysis: Analysis, savings: Savings, held: dict[str, float]) -> Iterable[Finding]:
    yield _finding(
        savings,
        "data",
        savings.data_us,
        f"{share_text(held['data'])} of the critical path is data loading"
        f"{_where(analysis, 'data')}",
        "give the DataLoader more num_workers, and persistent_workers=True",
    )


def _copy(analysis: Analysis, savings: Savings, held: dict[str, float]) -> Iterable[Finding]:
    rows = [row.copies for row in analysis.steps if row.steady]
    by_direction = {
        name: sum(getattr(row, f"{name}_us") for row in rows) / len(rows) for name in DIRECTIONS
    }
    main = max(DIRECTIONS, key=lambda name: by_direction[name])
    yield _finding(
        savings,
        "copy",
        savings.copy_us,
        f"{share_text(held['copy'])} of the critical path is device copies, "
        f"{time_text(by_direction[main])} a step of it {_COPIES[main]}{_where(analysis, 'copy')}",
        _COPY_FIXES[main],
    )


def _update(
    analysis: Analysis, facts: JobFacts, savings: Savings, held: dict[str, float]
) -> Iterable[Finding]:
    saves = savings.update_us
    fused = _is_fused(facts)
    advice = "" if fused else "use the optimizer's fused=True, if it has this option"
    sharing = _sharded_update(analysis, facts, savings)
    if sharing > _MIN_SHARE * savings.step_us:
        shard = (
            "shard it over the ranks (ZeroRedundancyOptimizer), which saves at most "
            f"{time_text(sharing)} a step"
        )
        advice = f"{advice}, or {shard}" if advice else shard
        saves = sharing if fused else saves
    if not advice:
        advice = "update parameters less often, or use an optimizer with fewer states: it is fused"
    yield _finding(
        savings,
        "update",
        saves,
        f"{share_text(held['update'])} of the critical path is the optimizer's update",
        advice,
    )


def _sharded_update(analysis: Analysis, facts: JobFacts, savings: Savings) -> float:
    """Estimates the savings of ZeRO stage 1: each rank updates its shard, then all ranks gather."""
    ranks = analysis.trace.world_size
    exchange = next(
        (each for each in facts.exchanges if each.op == "all_reduce" and each.gradients), None
    )
    if not facts.replicated or facts.shares_update or exchange is None or ranks < 2:
        return 0.0
    # A ring's all_gather moves half of what its all_reduce moves.
    return savings.update_us * (1 - 1 / ranks) - exchange.transfer_us / 2


def _compute(analysis: Analysis, savings: Savings, held: dict[str, float]) -> Iterable[Finding]:
    top = _largest(analysis, "compute")
    what = ""
    if top is not None and top.name is not None:
        what = f"; its largest part is {_named(top)} on rank {top.rank}, {time_text(top.us)} a step"
    advice = "speed up the model itself (lower precision, torch.compile, larger batches)"
    if _knows_communication(analysis):
        rest = savings.transfer_us / savings.step_us
        advice += f": faster communication saves at most {share_text(rest)} of the step"
    yield _finding(
        savings,
        "compute",
        savings.compute_us,
        f"{share_text(held['compute'])} of the critical path is forward and backward{what}",
        advice,
    )


def _knows_communication(analysis: Analysis) -> bool:
    """Whether the trace shows how the ranks communicate: messages, and no kernels in doubt."""
    return not analysis.trace.suspected_communication and any(
        row.messages for row in analysis.ranks
    )


def _where(analysis: Analysis, category: str) -> str:
    top = _largest(analysis, category)
    return "" if top is None else f", most of it on rank {top.rank}"


def experiment_command(analysis: Analysis, strategies: tuple[str, ...]) -> str | None:
    """Trains the job with strategies; None where its command is not known or nothing tests it."""
    trace = analysis.trace
    if trace.source != "ddltrace" or not strategies or not trace.command:
        return None
    experiments = extension("advice")
    command = None if experiments is None else experiments.command(strategies, trace.command)
    return None if command is None else f"{command}{_masked_note(trace.command)}"


def _strategies(analysis: Analysis, facts: JobFacts, change: Change | None) -> tuple[str, ...]:
    """The strategies that make a change in a real job; none without the package of experiments."""
    if change is None:
        return ()
    experiments = extension("advice")
    if experiments is None:
        return ()
    chosen: tuple[str, ...] = experiments.strategies(
        change.kind,
        change.amount,
        wrapper=facts.wrapper,
        all_ranks=change.ranks == analysis.trace.world_size,
    )
    return chosen


def _again(analysis: Analysis, path: Location | None) -> str | None:
    """Returns commands to record the job again, if its command is known, and compare the traces.

    None if the trace has neither a command nor a single path.
    """
    trace = analysis.trace
    compare = None if path is None else f"ddltrace compare {shlex.quote(str(path))} after"
    job = shlex.join(trace.command)
    if trace.source != "ddltrace" or not job:
        return compare
    level = f" --level {trace.level}" if trace.level in ("comm", "op") else ""
    record = f"ddltrace run{level} -o after -- {job}"
    return (record if compare is None else f"{record} && {compare}") + _masked_note(trace.command)


def _masked_note(command: Sequence[str]) -> str:
    """A comment of the shell behind a command from which secrets are missing."""
    return f"  # secrets were not recorded: fill in {MASK}" if is_masked(command) else ""


def _largest(analysis: Analysis, category: str) -> PathPart | None:
    return next((part for part in analysis.critical_path if part.category == category), None)


def _named(part: PathPart) -> str:
    """Names of kernels and of tensors may be longer than the sentence that they stand in."""
    return shorten(printable(part.name or part.category), _MAX_NAME)
