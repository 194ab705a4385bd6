"""What a replay predicts of the strategies that the findings propose, as ``ddltrace whatif`` does.

Only what takes little time beside the analysis: a few strategies, on the last steps, in traces
whose steps have few messages for their events. Codecs are not timed for it: a strategy that needs
one is predicted from a calibration in the trace's folder, or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddltrace.analyzer.measures.finding import Prediction
from ddltrace.tracer.errors import TraceError, UsageError, is_store_failure
from ddltrace.tracer.extensions import extension

if TYPE_CHECKING:
    from ddltrace.analyzer.model import Analysis
    from ddltrace.analyzer.trace.opened_trace import Trace

_STRATEGIES: Final = 5
_STEPS: Final = 10
_MOST_MESSAGES: Final = 850
"""Messages of a step, of all ranks, for which a prediction takes some 150 ms."""
_EVENTS_PER_MESSAGE: Final = 900
"""For each further message of a step so many events, whose analysis takes five times as long as
the prediction."""


def with_predictions(trace: Trace, analysis: Analysis) -> Analysis:
    """Adds to the findings how long a step would take with the strategies that they propose.

    Args:
        trace: The analyzed trace.

    Returns:
        The analysis, with `Finding.predicted` where a replay answers.
    """
    proposed = [spec for finding in analysis.findings for spec in finding.strategies]
    strategies = extension("whatif") if proposed else None
    if strategies is None:
        return analysis
    specs = [spec for spec in dict.fromkeys(proposed) if spec != strategies.PLAIN][:_STRATEGIES]
    steady = [row.step for row in analysis.steps if row.steady][-_STEPS - 1 :]
    messages = sum(row.messages for row in analysis.ranks) / max(analysis.summary.steps, 1)
    most = _MOST_MESSAGES + analysis.trace.events / _EVENTS_PER_MESSAGE
    if len(steady) < 2 or len(specs) * messages > most:
        return analysis
    from ddltrace.analyzer.whatif.questions import WARN, Question, what_if  # takes a while

    steps = range(steady[0], steady[-1] + 1)
    try:
        asked = what_if(trace.within(steps), steps)
    except (TraceError, UsageError) as error:  # no two steps in a row; a damaged calibration
        if is_store_failure(error):
            raise
        return analysis
    asked.times_codecs = False
    if abs(asked.self_replay_error) > WARN:
        return analysis
    found = {spec: asked.ask(Question(strategy=spec)) for spec in specs}
    predicted = {
        spec: Prediction(spec, asked.baseline_us, answer.step_us, answer.low_us, answer.high_us)
        for spec, answer in found.items()
        if answer.step_us is not None and answer.low_us is not None and answer.high_us is not None
    }
    findings = [
        replace(
            finding,
            predicted=tuple(predicted[spec] for spec in finding.strategies if spec in predicted),
        )
        for finding in analysis.findings
    ]
    return replace(analysis, findings=tuple(findings))
