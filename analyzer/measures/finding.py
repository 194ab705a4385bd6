"""A finding: a possible improvement, with the measurement that it is based on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_RECORDS: Final = "ddltrace run "
_OF_JOB: Final = (_RECORDS, "ddltrace compare ")


@dataclass(frozen=True)
class Prediction:
    """How long a step would take with a strategy, by a replay of the last steady steps.

    Attributes:
        strategy: The strategy.
        baseline_us: Median time per step of the replayed steps as they are.
        step_us: The same with the strategy.
        low_us: Lower end of its 90 % interval.
        high_us: Upper end.
    """

    strategy: str
    baseline_us: float
    step_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True)
class Finding:
    """A finding: a possible improvement, with the measurement that it is based on.

    Attributes:
        kind: Its subject: ``communication``, ``network``, ``pipeline``, ``straggler``, ``data``,
            ``copy``, ``host``, ``update``, ``compute``, ``memory``, ``device``, ``processors`` or
            ``stopped``.
        saves_us: Upper bound on what a step could get shorter; 0 if the trace does not show, for
            ``memory``, ``device`` and ``processors``.
        share: The same as a share of the step.
        evidence: The measurement, one sentence.
        advice: The proposed change, one sentence.
        command: A command that tests it: an experiment, or a new recording after the change and a
            comparison. If the trace does not contain the job's command, as traces of other tools,
            only the comparison with the new trace, `after`; None if the trace was opened from
            several directories.
        unsure: Whether it is based on differences below the error of the aligned clocks.
        strategies: The strategies that `ddltrace experiment run` compares to test the advice;
            empty where no strategy tests it.
        rank: The rank whose fault it is; None for what all ranks share.
        predicted: What a replay predicts of `strategies`, of those that it can answer.
    """

    kind: str
    saves_us: float
    share: float
    evidence: str
    advice: str
    command: str | None = None
    unsure: bool = False
    strategies: tuple[str, ...] = ()
    rank: int | None = None
    predicted: tuple[Prediction, ...] = ()

    @property
    def is_of_job(self) -> bool:
        """Whether `command` compares with the job after a change; it is then the same for all."""
        return self.command is not None and self.command.startswith(_OF_JOB)

    @property
    def has_saving(self) -> bool:
        """Whether the possible savings are known."""
        return self.saves_us > 0

    @property
    def instruction(self) -> str:
        """The instruction that precedes `command`."""
        if not self.is_of_job:
            return "Test it"
        is_recorded = self.command is not None and self.command.startswith(_RECORDS)
        how = "" if is_recorded else ", record it again into 'after' as this trace was recorded"
        return f"To test a change of the job{how}"
