"""Training with servers that apply each worker's updates: SSP, ASP and the like."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddltrace.experiments.architectures.parameter_server import ParameterServer
from ddltrace.experiments.asynchrony.server_group import Answered, ServerGroup
from ddltrace.experiments.asynchrony.server_optimizer import OPTIMIZERS, settings_of
from ddltrace.experiments.codecs.feedback import compose
from ddltrace.experiments.engine.parameter_access import raw_gradient
from ddltrace.experiments.engine.refusal import refuse
from ddltrace.experiments.frequency.frequency import StepContext, StepPolicy
from ddltrace.experiments.messages.trace_marks import mark, region
from ddltrace.experiments.observation.notes import report_choice, report_restriction
from ddltrace.experiments.strategy.strategy import Strategy
from ddltrace.experiments.synchronization.marks import mark_name


class ServerUpdates(StepPolicy):
    """Pushes the gradients that the optimizer would see; continues with the servers' parameters.

    The optimizer's arithmetic runs on the servers; the job's own optimizer updates nothing. A job
    that clips gradients clips each worker's own. The parameters that a worker has pushed to and
    read from are never averaged between workers.
    """

    ends_before_others: ClassVar[bool] = True

    def __init__(self, strategy: Strategy, context: StepContext) -> None:
        """Starts the servers. Collective.

        Args:
            strategy: A strategy with dedicated servers.
            context: The job.
        """
        super().__init__(context)
        assert isinstance(strategy.architecture, ParameterServer)
        self._spec = strategy.spec
        self._parameters = [parameter for _, parameter in context.parameters]
        self._index_of = {id(p): index for index, p in enumerate(self._parameters)}
        description = compose(strategy.codec, strategy.feedback)
        try:
            self.servers = ServerGroup(
                context.group,
                context.parameters,
                servers=strategy.architecture.dedicated(),
                spec=strategy.spec,
                backend=dist.get_backend(context.messages),
                codec=None if description is None else description.codec(None),
            )
        except RuntimeError as error:
            refuse(strategy.spec, str(error))
        placement = self.servers.placement
        report_choice("placement", placement.describe(), placement.to_json())
        self._rank = dist.get_rank()
        self._clock = 0
        self._optimizer: Optimizer | None = None
        self._settings: Any = None
        self._begun_ns = time.monotonic_ns()
        self._ended = False

    def exchanges_gradients(self) -> bool:
        """Never between workers."""
        return False

    def before_update(self, optimizer: Optimizer) -> bool:
        """Pushes, waits for the answer, and takes over the parameters."""
        if self._optimizer is None:
            self._begin(optimizer)
        elif self._optimizer is not optimizer:
            refuse(self._spec, "the job updates its model with more than one optimizer")
        now = time.monotonic_ns()
        mark(mark_name("step", worker=self._rank, clock=self._clock), self._begun_ns)
        gradients = {}
        for index, parameter in enumerate(self._parameters):
            gradient = raw_gradient(parameter)
            if gradient is not None:
                gradients[index] = gradient.to_dense() if gradient.is_sparse else gradient
        settings = settings_of(optimizer)
        changed, self._settings = settings != self._settings, settings
        with region("wait", f"push {self._clock} and parameters for the next step"):
            answered = self.servers.push(
                self._clock, now - self._begun_ns, gradients, settings if changed else None
            )
        self._take(answered)
        self._clock = answered.clock
        self._begun_ns = time.monotonic_ns()
        return False

    def complete_checkpoint(self, optimizer: Optimizer) -> None:
        """Puts the state of the servers' optimizer into the job's own."""
        if self._ended:
            report_restriction(
                self._spec,
                "a checkpoint that is saved after the end of the training lacks the optimizer's "
                "state, because the servers have ended",
            )
            return
        with region("wait", "the state of the servers' optimizer"):
            states = self.servers.state()
        for index, parameter in enumerate(self._parameters):
            if states.get(index):
                optimizer.state[parameter] = states[index]

    def end(self) -> None:
        """Takes over the parameters at the end of all workers' training, and leaves the servers."""
        if self._ended:
            return
        self._ended = True
        with region("wait", "the end of the training of all workers"):
            answered = self.servers.finish(self._clock)
        if answered.filled:
            self._take(answered)
        self.servers.close()

    def _begin(self, optimizer: Optimizer) -> None:
        """Brings the servers the parameters: not earlier, a job may load a checkpoint first."""
        name = type(optimizer).__name__
        if name not in OPTIMIZERS or type(optimizer) is not getattr(torch.optim, name):
            refuse(
                self._spec,
                f"its servers run the optimizer, and cannot run {name}; "
                f"use one of torch.optim's {', '.join(OPTIMIZERS)}",
            )
        groups = {
            self._index_of[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._index_of
        }
        self._optimizer = optimizer
        self._settings = settings_of(optimizer)
        states = {
            index: optimizer.state[parameter]
            for index, parameter in enumerate(self._parameters)
            if parameter in optimizer.state
        }
        optimizer.register_load_state_dict_post_hook(self._refuse_late_load)
        self.servers.fill(name, self._settings, groups, states)
        self._begun_ns = time.monotonic_ns()

    def _refuse_late_load(self, optimizer: Optimizer) -> None:
        del optimizer
        refuse(
            self._spec,
            "the job loads a checkpoint after its first step, when the servers have the "
            "parameters; load it before",
        )

    @torch.no_grad()
    def _take(self, answered: Answered) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.copy_(answered.values[index].view(parameter.shape))
