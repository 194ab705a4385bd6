"""Why a strategy cannot be applied to a job, as far as the job is known.

`ddltrace experiment run` asks before anything is started, and the engine in the job.
"""

from __future__ import annotations

from collections.abc import Collection

from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.codecs.thc import Thc, levels
from ddltrace.experiments.schedules.search import BayesianSearch
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.bsp import Backup
from ddltrace.experiments.synchronization.grouped import Grouped
from ddltrace.tracer.optional_packages import require_extra


def refused_ranks(strategy: Strategy, ranks: int, examples: int | None = None) -> str | None:
    """Why a strategy cannot run on so many ranks; None if it can.

    Args:
        ranks: Ranks of the job.
        examples: Examples of all ranks in one step; None if they are not known.
    """
    rule, transport = strategy.synchronization, strategy.transport
    groups = rule.groups(ranks) if isinstance(rule, Grouped) else [range(ranks)]
    try:
        if isinstance(rule, Backup):
            rule.check_ranks(ranks)
        if isinstance(strategy.architecture, ParameterServer):
            strategy.architecture.check_ranks(min(map(len, groups)))
        if isinstance(strategy.codec, Thc):
            levels(ranks)
        if strategy.parallelism is not None:
            strategy.parallelism.check_ranks(ranks)
            if examples is not None:
                strategy.parallelism.check_examples(examples)
    except ValueError as error:
        return str(error)
    if (
        isinstance(rule, Grouped)
        and rule.size < ranks
        and transport is not None
        and transport.whole_job
    ):
        return (
            f"the groups of grouped:size={rule.size} are parts of the job, and the transport "
            f"{transport.name} needs all of its ranks; choose tcp, zmq or grpc"
        )
    return None


def refused_optimizer(strategy: Strategy, kinds: Collection[str]) -> str | None:
    """Why a strategy cannot run with an optimizer; None if it can.

    Args:
        kinds: Names of the optimizer's class and of its base classes, the own one first.
    """
    for part, what in (
        (strategy.schedule, "its local step is that of SGD"),
        (strategy.codec, "its codec takes the place of SGD's momentum"),
    ):
        accepted = None if part is None else part.optimizers
        if accepted is not None and not set(accepted) & set(kinds):
            return f"{what}, and the job uses {next(iter(kinds))}; use torch.optim.SGD"
    return None


def require_packages(strategy: Strategy) -> None:
    """Checks that the packages are installed by which a strategy searches.

    Raises:
        MissingCapabilityError: One is missing.
    """
    if isinstance(strategy.schedule.search(), BayesianSearch):
        require_extra("experiments", "tune=true")
