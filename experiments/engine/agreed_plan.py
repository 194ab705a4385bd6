"""The plan of messages on which all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.layer_order import LayerOrder
from ddltrace.experiments.engine.schedule_calibration import GradientTiming, ScheduleSearch
from ddltrace.experiments.engine.step_in_progress import StepInProgress
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, describe_gradient
from ddltrace.experiments.schedules.base import Dispatcher, Schedule


class AgreedPlan:
    """A schedule's plan of messages, the same on all ranks.

    The ranks' gradients may become ready in different orders, but all ranks must start their
    messages in one order. In the first step nothing starts before backward has ended; then
    rank 0 sends the order in which its gradients became ready to the others, and the plan follows
    this order. From then on messages go in the order of the plan, or as rank 0 decides.

    Attributes:
        schedule: The schedule; another one after a search, or once its times are measured.
        plan: The messages; None until the ranks have agreed.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        layers: LayerOrder | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Begins without a plan.

        Args:
            schedule: Order and grouping of messages.
            model: The module with the parameters.
            parameters: The trainable parameters with their names, the same on all ranks.
            layers: Sees in which order layers use the parameters; None if that does not matter.
            group: The ranks.
        """
        self.schedule = schedule
        self.plan: MessagePlan | None = None
        self._parameters, self._layers, self._group = parameters, layers, group
        sparse_weights = {
            id(layer.weight)
            for layer in model.modules()
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        }
        self._sparse = {i for i, (_, p) in enumerate(parameters) if id(p) in sparse_weights}
        self._gradients: list[Gradient] = []
        search = schedule.search()
        self._search = None if search is None else ScheduleSearch(schedule, search, group)
        self._timing = GradientTiming(schedule, group) if schedule.timed_steps else None

    @property
    def _decides(self) -> bool:
        """Whether this rank's dispatcher decides which messages start."""
        return self.schedule.agreement == "plan" or dist.get_rank(self._group) == 0

    def dispatcher(self) -> Dispatcher | None:
        """A dispatcher for one step; None without a plan, and on ranks that follow rank 0."""
        if self.plan is None or not self._decides:
            return None
        return self.schedule.dispatcher(self.plan)

    def change(self, *, exchanges: bool) -> bool:
        """Changes the plan by what was measured; while no message is in flight. Collective.

        Args:
            exchanges: Whether the next backward pass exchanges gradients.

        Returns:
            Whether it has changed.
        """
        if self.plan is None:
            return False
        before = self.plan
        if exchanges and self._search is not None:
            chosen = self._search.after_step()
            if chosen is not None:
                self._follow(chosen)
            if self._search.over:
                self._search = None
        if self._timing is not None:
            measured = self._timing.after_step(self._gradients)
            if measured is not None:
                self._timing = None
                schedule, self._gradients = measured
                self._follow(schedule)
            elif exchanges:
                self._timing.begin()
        return self.plan is not before

    def _follow(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.plan = schedule.plan(self._gradients)

    def gradient_ready(self, index: int, gradient: torch.Tensor) -> None:
        """Notes the time at which a gradient was ready, if the schedule has to know it."""
        if self._timing is not None and self.plan is not None:
            self._timing.ready(index, gradient)

    def agree(
        self, step: StepInProgress, missing: Sequence[int], *, find_unused: bool
    ) -> list[int]:
        """Agrees on the plan at the end of the first backward pass. Collective.

        Args:
            step: The first step.
            missing: The parameters without a gradient on this rank.
            find_unused: Whether ranks may differ in that.

        Returns:
            The parameters whose gradients are sparse, and are not part of the plan.
        """
        # Those without a gradient come last, from the output layer on.
        order = [*step.arrived, *reversed(missing)]
        sparse = {*step.sparse_gradients, *self._sparse.intersection(missing)}
        uses = [-1] * len(self._parameters) if self._layers is None else self._layers.uses()
        facts = torch.tensor(
            [order, uses, [int(i in sparse) for i in range(len(uses))]],
            dtype=torch.int64,
        ).to(self._parameters[0][1].device)
        dist.broadcast(facts[:2], group=self._group, group_src=0)
        if find_unused:  # rank 0 may have no gradient of a parameter that is sparse elsewhere
            dist.all_reduce(facts[2], op=dist.ReduceOp.MAX, group=self._group)
        order, uses, is_sparse = facts.tolist()
        if self._layers is not None:
            self._layers.adopt()
        self._gradients = [self._describe(index, uses) for index in order if not is_sparse[index]]
        self.plan = step.plan = self.schedule.plan(self._gradients)
        return [index for index in order if is_sparse[index]]

    def _describe(self, index: int, uses: list[int]) -> Gradient:
        use = None if uses[index] < 0 else uses[index]
        return describe_gradient(index, *self._parameters[index], use)
