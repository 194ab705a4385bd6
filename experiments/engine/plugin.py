"""The plug-in that the tracer loads into every rank: its entry point ``strategy``.

For ``ddltrace run`` with ``--strategy``, ``--steps`` or ``--slow``. `check` runs in the launcher
and `install` in each rank, when it has joined its process group.
"""

from __future__ import annotations

from typing import Any


def check(options: dict[str, Any]) -> None:
    """Checks the options before the job starts.

    Args:
        options: ``strategy``: a spec, or None to leave communication as it is; ``steps``: after
            how many optimizer steps the job ends, or None; ``slow``: ranks that compute more
            slowly; ``plugin``: files of techniques. ``techniques`` is set: the record of each
            plug-in, from which the ranks load it.

    Raises:
        ddltrace.tracer.errors.UsageError: The strategy's spec, a slow rank or a plug-in is wrong.
    """
    from ddltrace.experiments.pacing.slowdown import read_slowdown
    from ddltrace.experiments.strategy import plugins
    from ddltrace.experiments.strategy.spec import parse
    from ddltrace.tracer.errors import UsageError

    options["techniques"] = plugins.load(options.get("plugin", ()))
    for text in options.get("slow", ()):
        read_slowdown(text, None)
    spec = options.get("strategy")
    strategy = None if spec is None else parse(spec)
    if strategy is not None and strategy.parallelism and not strategy.changes_sharded_job:
        raise UsageError(
            f"strategy {spec!r:.80}: only built-in workloads can be split over "
            "ranks; run it with: ddltrace experiment run --workload gpt"
        )


def install(options: dict[str, Any]) -> None:
    """Applies the strategy to this process.

    Args:
        options: As for `check`.

    Raises:
        StrategyRefusedError: They cannot be applied to this process.
    """
    from ddltrace.experiments.engine.job import JobStrategy
    from ddltrace.experiments.engine.refusal import end_job
    from ddltrace.experiments.engine.sharded_job import ShardedJob
    from ddltrace.experiments.engine.step_limit import StepLimit
    from ddltrace.experiments.observation.job_observer import install_if_asked
    from ddltrace.experiments.strategy import plugins
    from ddltrace.experiments.strategy.spec import parse
    from ddltrace.tracer.errors import MissingCapabilityError, UsageError

    # Before the limit: its hook ends the job, and the last step is to be observed.
    install_if_asked()
    try:
        plugins.load_recorded(options.get("techniques", ()))
        strategy = None if options.get("strategy") is None else parse(options["strategy"])
    except UsageError as error:  # this rank is on another host, with other files
        end_job(str(error))
    if strategy is not None and strategy.changes_sharded_job:
        ShardedJob(strategy).install()
    elif strategy is not None:
        JobStrategy(strategy).install()
    try:
        if options.get("slow"):
            from ddltrace.experiments.engine.slow_rank import SlowRank

            SlowRank(options["slow"]).install()
        if options.get("steps"):
            StepLimit(int(options["steps"])).install()
    except MissingCapabilityError as error:
        end_job(str(error))
