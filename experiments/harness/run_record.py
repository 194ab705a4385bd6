"""The record of one run: one strategy, trained once, with its measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Status = Literal["complete", "diverged", "failed", "hung"]
"""How a run ended: trained to the end with finite losses; with losses that are not finite; with
an error; ended by the harness because it ran longer than ``--timeout``."""

FINISHED: Final = ("complete", "diverged")
"""Statuses of measured runs, which ``experiment resume`` does not repeat."""


@dataclass(frozen=True)
class Run:
    """One strategy in one round. Unmeasured values are None.

    Times are in microseconds; means are over ranks and steady steps.

    Attributes:
        strategy: The strategy's spec, or a trace's name.
        round: Number of the round, from 1.
        seed: Seed of the weights, the split and the order of the data.
        status: How the run ended: ``complete``, ``diverged`` (its losses are not finite),
            ``failed`` or ``hung`` (it was ended after ``--timeout``).
        reason: Why it did not complete; None if it did.
        trace: The trace's directory, relative to the results' directory; None if the run left no
            trace that can be read.
        first_step: Number of the first steady step.
        step_us: Wall time of every steady step over all ranks, in order; where ranks run ahead
            of each other, the mean over ranks of their own times.
        elapsed_us: End of every step on the lowest rank, warm-up included, from the start of the
            first step; where ranks run ahead of each other, the mean over ranks.
        losses: Mean over ranks of each step's loss, warm-up included; None where it diverged.
        overlap_ratio: Share of communication hidden under computation.
        exposed_us: Communication that is not hidden, per step.
        payload_bytes: Bytes that a rank hands to its messages, per step.
        wire_bytes: Bytes that a rank's sockets sent, per step.
        messages: Messages of a rank, per step.
        encode_us, decode_us: Time that a rank spends in a codec, per step.
        peak_memory_bytes: Largest resident memory of a rank process; of the rank's device if it
            trains on one.
        train_loss: Over all training examples, at the end.
        test_loss: Over the held-out examples, at the end.
        test_accuracy: On the held-out examples, at the end, 0 to 1.
        replicas_identical: Whether all ranks ended with the same parameters to the last bit.
        synchronization: How far ahead of each other workers ran, and whether the rule's promises
            were kept; None if the trace has no clocks.
        choices: What the strategy chose by sizes or measurements: ``auto`` (groups, links and the
            architecture for each size), ``placement`` (loads of the servers and their skew). And
            ``protocol``: the profile that paced the messages, with its sources, and the number and
            times of the messages to rank 0. And ``found``: the schedule that a search or
            calibration has found.
        calibration: What the strategy searched or measured with messages of its own, apart from
            all other values: ``steps`` up to its end, none of which is measured; ``bytes`` and
            ``messages`` of a rank for it, over the whole run. None if it did not.
        wall_s: Seconds that the job took from its start to its end.
        other_cores: Cores that other processes, and the kernel on its own behalf, kept busy while
            the job ran, in the mean; None where the kernel does not say.
        notes: Restrictions on the validity of the numbers.
    """

    strategy: str
    round: int = 1
    seed: int | None = None
    status: Status = "complete"
    reason: str | None = None
    trace: str | None = None
    first_step: int | None = None
    step_us: list[float] = field(default_factory=list)
    elapsed_us: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    overlap_ratio: float | None = None
    exposed_us: float | None = None
    payload_bytes: float | None = None
    wire_bytes: float | None = None
    messages: float | None = None
    encode_us: float | None = None
    decode_us: float | None = None
    peak_memory_bytes: float | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    replicas_identical: bool | None = None
    synchronization: dict[str, Any] | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    wall_s: float | None = None
    other_cores: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        """Whether it was trained to its last step and measured."""
        return self.status in FINISHED
