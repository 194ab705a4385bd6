"""Rules for techniques that cannot be combined, with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.codecs.feedback import DoubleSqueeze, compose
from ddltrace.experiments.codecs.thc import Thc
from ddltrace.experiments.frequency.noloco import NoLoCo
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.experiments.strategy.strategy import Strategy


@dataclass(frozen=True)
class Rule:
    """One kind of combination that cannot work.

    Attributes:
        applies: Whether a strategy is such a combination.
        reason: Why it cannot work.
        valid: A valid alternative.
    """

    applies: Callable[[Strategy], object]
    reason: str
    valid: str


_MANY: Final = 8
"""Minimum number of ranks for which codecs choose their typical form of exchange."""


def _refuses_its_modifier(strategy: Strategy) -> bool:
    try:
        compose(strategy.codec, strategy.feedback)
    except ValueError:
        return True
    return False


def _has_own_servers(strategy: Strategy) -> bool:
    """Whether the strategy has servers in processes of their own."""
    architecture = strategy.architecture
    return isinstance(architecture, ParameterServer) and architecture.dedicated() > 0


def _form(strategy: Strategy) -> str:
    """How the payloads of a strategy's codec are exchanged between many ranks."""
    codec = compose(strategy.codec, strategy.feedback)
    return "all_reduce" if codec is None else codec.exchange(1, _MANY)


def _adds_to_split(strategy: Strategy) -> bool:
    """Whether a split training has something beside it that it cannot have."""
    if strategy.parallelism is None:
        return False
    split = Strategy(spec=strategy.spec, schedule=DdpBuckets(), parallelism=strategy.parallelism)
    if strategy.changes_sharded_job and strategy.exchanges == "parameters":
        split = replace(
            split,
            frequency=strategy.frequency,
            codec=strategy.codec,
            feedback=strategy.feedback,
        )
    return strategy != split


RULES: Final = (
    Rule(
        _adds_to_split,
        "a split training sends what its split needs, in PyTorch's own ways",
        "name the parallelism alone, and compare it with other strategies as rows; only fsdp can "
        "have a frequency technique that averages parameters beside it, with a codec for these",
    ),
    Rule(
        _refuses_its_modifier,
        "the codec keeps a residual of its own, or its payloads are summed as they are, so the "
        "modifier beside it cannot work",
        "leave out feedback or doublesqueeze, or choose topk, onebit, signsgd, int8, fp8, int4 or "
        "qsgd",
    ),
    Rule(
        lambda s: s.exchanges != "gradients" and not isinstance(s.schedule, DdpBuckets),
        "the frequency technique exchanges no gradients in backward, so there is nothing that a "
        "schedule could order",
        "leave out the schedule, or choose accumulate:steps= as the frequency",
    ),
    Rule(
        lambda s: s.exchanges == "momentum" and (s.encodes or s.optimizer_rule),
        "demo and dion encode momentum themselves and take the optimizer's place",
        "leave out the codec and the optimizer rule",
    ),
    Rule(
        lambda s: (
            isinstance(s.frequency, NoLoCo)
            and (s.encodes or s.architecture is not None or s.transport is not None)
        ),
        "noloco sends parameters to one rank at a time, by messages of its own",
        "use noloco alone or with an optimizer rule, or choose diloco",
    ),
    Rule(
        lambda s: s.exchanges == "parameters" and (s.codec is not None and s.codec.takes_momentum),
        "dgc accumulates the momentum of gradients, and the frequency technique exchanges "
        "parameters",
        "choose topk+feedback as the codec",
    ),
    Rule(
        lambda s: (
            s.exchanges == "parameters"
            and (s.codec is not None and s.codec.gives_votes)
            and s.feedback is None
        ),
        "the vote of signsgd has no scale, and the frequency technique exchanges distances",
        "add feedback, which sends the scale, too",
    ),
    Rule(
        lambda s: isinstance(s.schedule, Poseidon) and (s.encodes or s.frequency is not None),
        "poseidon exchanges factors of the gradients of one step, which codecs and frequency "
        "techniques cannot change",
        "choose wfbp as the schedule",
    ),
    Rule(
        lambda s: (s.codec is not None and s.codec.whole_tensors) and s.schedule.cuts_tensors,
        "the codec encodes whole tensors, and the schedule cuts them into slices",
        "choose a schedule that keeps tensors whole, such as wfbp or ddp",
    ),
    Rule(
        lambda s: (
            s.schedule.wait == "next_update" and (s.encodes or s.frequency or s.optimizer_rule)
        ),
        "odsgd delays plain averages of every step's gradients by one step, and updates with SGD",
        "use odsgd alone, or choose wfbp or ddp as the schedule",
    ),
    Rule(
        lambda s: (
            s.architecture is not None
            and (isinstance(s.schedule, Poseidon) or s.exchanges == "momentum")
        ),
        "poseidon, demo and dion exchange something else than gradients, by collectives of their "
        "own",
        "leave out the architecture, or choose wfbp as the schedule",
    ),
    Rule(
        lambda s: (
            s.architecture is not None
            and s.place != "servers"
            and _form(s) not in s.architecture.forms
        ),
        "the codec's payloads cannot be summed as they are, and the architecture sums on the way "
        "at ranks that would have to decode and encode again at every step",
        "choose mesh for every codec, ring for topk or dgc, ps:sharded=true for qsgd, int8, "
        "fp8, int4, onebit or ternary, which are encoded again once; or fp16, bf16, thc, randomk "
        "or powersgd as the codec",
    ),
    Rule(
        lambda s: (
            _has_own_servers(s)
            and s.place != "servers"
            and (s.codec is not None and (s.codec.whole_tensors or isinstance(s.codec, Thc)))
        ),
        "powersgd sums two factors after each other, thc finds a maximum before its sum, and "
        "servers of their own serve one sum",
        "choose ps:sharded=true",
    ),
    Rule(
        lambda s: s.place == "servers" and not _has_own_servers(s),
        "workers run ahead of each other, and only servers in processes of their own can apply "
        "each worker's updates as they come: other architectures sum what all ranks send in the "
        "same step, and a shard on a slow worker is slow, too",
        "name dedicated servers, as in ps:servers=1+ssp:bound=3, or choose bsp, grouped, gossip or "
        "adpsgd, which need no servers",
    ),
    Rule(
        lambda s: _has_own_servers(s) and (s.transport is not None and s.transport.whole_job),
        "servers are processes of their own, and the transport has no process but the job's ranks",
        "choose tcp, zmq or grpc as the transport, or ps:sharded=true",
    ),
    Rule(
        lambda s: s.place == "peers" and s.architecture is not None,
        "gossip and adpsgd say themselves who sends to whom",
        "leave out the architecture",
    ),
    Rule(
        lambda s: s.place == "peers" and s.encodes,
        "gossip and adpsgd exchange parameters, which do not bear the loss of a codec",
        "leave out the codec",
    ),
    Rule(
        lambda s: (
            s.place in ("servers", "peers")
            and (s.frequency is not None or not isinstance(s.schedule, DdpBuckets))
        ),
        "no gradients are averaged in backward, so there is nothing that a schedule or a frequency "
        "technique could order or leave out",
        "leave out the schedule and the frequency technique",
    ),
    Rule(
        lambda s: s.place == "servers" and s.optimizer_rule is not None,
        "servers keep parts of layers and update them with the job's own optimizer",
        "leave out the optimizer rule",
    ),
    Rule(
        lambda s: (
            s.place == "servers"
            and (
                (s.codec is not None and s.codec.whole_tensors)
                or (s.codec is not None and s.codec.takes_momentum)
                or ((s.codec is not None and s.codec.gives_votes) and s.feedback is None)
                or isinstance(s.feedback, DoubleSqueeze)
            )
        ),
        "a server gets parts of tensors from one worker at a time, while powersgd needs whole "
        "ones, signsgd the votes of all workers, doublesqueeze a second pass, and dgc takes the "
        "momentum that the server has",
        "choose topk, onebit, int8, fp8, int4, qsgd, ternary, thc, randomk, fp16 or bf16, with or "
        "without feedback",
    ),
    Rule(
        lambda s: (
            s.place == "groups"
            and (
                s.frequency is not None
                or s.schedule.wait != "update"
                or isinstance(s.schedule, Poseidon)
            )
        ),
        "after some steps all groups average their parameters, which have to be updated by then",
        "choose wfbp, fifo or ddp as the schedule, and no frequency technique",
    ),
)


def violated(strategy: Strategy) -> Rule | None:
    """The first rule that a strategy breaks, or None."""
    return next((rule for rule in RULES if rule.applies(strategy)), None)
