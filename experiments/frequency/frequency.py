"""The base classes of frequency techniques, and of the policies that carry them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddltrace.experiments.collectives.base import Collectives, LibraryCollectives
from ddltrace.experiments.lazy_torch import dist, torch
from ddltrace.experiments.messages.message_exchange import MessageExchange
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.optimizer_rules.optimizer_rule import joined, split

if TYPE_CHECKING:
    from torch.optim import Optimizer

Exchanged = Literal["gradients", "parameters", "momentum"]


@dataclass(frozen=True)
class StepContext:
    """The model and ranks that a policy works on.

    Attributes:
        spec: The strategy.
        parameters: The model's trainable parameters with their names, the same on all ranks.
        group: The ranks that train the model together.
        messages: The same ranks in the group that carries the strategy's messages.
        exchange: Creates a new exchange with the strategy's codec, for tensors that the policy
            averages itself. Collective.
        outer: The weights of embeddings and of the last linear layer, by their `id`.
        encodes: Whether `exchange` encodes what it sends.
        keeps_residuals: Whether a modifier adds to the next message what an encoding has lost.
    """

    spec: str
    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    group: dist.ProcessGroup
    messages: dist.ProcessGroup
    exchange: Callable[[], MessageExchange]
    outer: frozenset[int] = frozenset()
    encodes: bool = False
    keeps_residuals: bool = False

    @property
    def collectives(self) -> Collectives:
        """Collectives of the ranks that train the model."""
        return LibraryCollectives(self.group)


class StepPolicy(ABC):
    """Decides, for one model, what its ranks exchange at which optimizer step.

    All ranks call their policies in the same order, so a policy may launch collectives in
    `before_update` and `after_update`. These two and `end` run under ``torch.no_grad``.

    Attributes:
        ends_before_others: Whether a rank has to call `end` when it has made its last step, since
            other ranks would wait for its next one.
        steps_alone: Whether ranks update by gradients of their own in some steps, but have to make
            the same number of steps. A GradScaler, which skips steps, cannot be used then.
        one_optimizer: Whether the model must not be updated by two optimizers in the same step.
        all_optimizers: Whether all optimizers of the model have to step in each step.
        acts_on_updates: Whether it changes what an optimizer's step does, so that a job has to
            update its model with an optimizer.
    """

    ends_before_others: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    one_optimizer: ClassVar[bool] = False
    all_optimizers: ClassVar[bool] = False
    acts_on_updates: ClassVar[bool] = True

    def __init__(self, context: StepContext) -> None:
        self.context = context

    @abstractmethod
    def exchanges_gradients(self) -> bool:
        """Whether the backward pass that begins now ends with averaged gradients.

        Asked once for each backward pass that DistributedDataParallel would synchronize. The
        answer has to be the same on all ranks.
        """

    def begin_forward(self) -> None:
        """Called before each forward pass of the model that records gradients."""
        return

    def gradient_ready(self, parameter: torch.nn.Parameter, *, exchanged: bool) -> None:
        """Called in backward when a parameter's gradient is complete, before it is sent.

        Args:
            parameter: Its ``grad`` may be changed in place, or be kept for a later step.
            exchanged: The result of `exchanges_gradients` for this backward pass.
        """
        del parameter, exchanged

    def gradient_kept(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Called where backward has ended without a gradient of a parameter, before all are sent.

        Returns:
            What earlier backward passes have left of it for this one; None if nothing.
        """
        del parameter
        return None

    def before_update(self, optimizer: Optimizer) -> bool:
        """Called before each step of the model's optimizer.

        Args:
            optimizer: The optimizer; every ``parameter.grad`` has the value that it will use.

        Returns:
            Whether the optimizer updates the parameters in this step. If not, the engine removes
            the gradients.
        """
        del optimizer
        return True

    def after_update(self, optimizer: Optimizer) -> None:
        """Called after each step of the model's optimizer."""
        del optimizer

    def settle(self) -> None:
        """Waits for pending messages and applies them: before a checkpoint and at the end."""
        return

    def end(self) -> None:
        """Waits for pending messages, at the end of the job on all ranks."""
        return

    def complete_checkpoint(self, optimizer: Optimizer) -> None:
        """Called before a checkpoint of the optimizer is made, on any rank: may add to its state.

        Args:
            optimizer: The optimizer whose `state_dict` is about to be returned.
        """
        del optimizer

    def state(self) -> dict[str, Any] | None:
        """The state that a checkpoint must contain; None if there is none.

        Called on any rank at any time between two steps, so it may not communicate.
        """
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint, on all ranks at the same step.

        Args:
            state: The result of `state`; its tensors may be on another device.

        Raises:
            ValueError: The state is that of another strategy or model.
        """
        raise ValueError("the checkpoint holds the state of another strategy")


class EveryStep(StepPolicy):
    """Averages gradients in every backward pass."""

    acts_on_updates: ClassVar[bool] = False

    def exchanges_gradients(self) -> bool:
        """Always."""
        return True


class ParametersApart(StepPolicy):
    """Ranks train parameters of their own, and get the mean of all ranks at the end."""

    steps_alone: ClassVar[bool] = True
    one_optimizer: ClassVar[bool] = True

    def __init__(self, context: StepContext, group: dist.ProcessGroup) -> None:
        """Takes the group.

        Args:
            context: What the policy works on.
            group: Its ranks, in the group that carries the messages.
        """
        super().__init__(context)
        self._parameters = [parameter for _, parameter in context.parameters]
        self._group = group
        self._ended = False

    def exchanges_gradients(self) -> bool:
        """Never."""
        return False

    def end(self) -> None:
        """Ends what is under way, and gives every rank the mean of all."""
        if self._ended:
            return
        self._ended = True
        self._end_messages()
        values = self._joined_parameters()
        with carrying("mean of all ranks at the end", self._parameters):
            dist.all_reduce(values, group=self._group)
        self._set(values.div_(self._group.size()))

    def _end_messages(self) -> None:
        """Ends what is under way."""

    def _joined_parameters(self) -> torch.Tensor:
        """A copy of all parameters, as one vector."""
        return joined([parameter.detach() for parameter in self._parameters])

    def _set(self, values: torch.Tensor) -> None:
        """Sets all parameters, from one vector."""
        with torch.no_grad():
            for parameter, part in zip(
                self._parameters, split(values, self._parameters), strict=True
            ):
                parameter.copy_(part)


class OwnUpdates(StepPolicy):
    """Exchanges something else than gradients, and updates in place of the job's optimizer."""

    steps_alone: ClassVar[bool] = True

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._own = {id(parameter) for _, parameter in context.parameters}

    def exchanges_gradients(self) -> bool:
        """Whether gradients are exchanged: never, they update what the rank keeps."""
        return False

    def owned(self, optimizer: Optimizer) -> list[tuple[dict[str, Any], torch.nn.Parameter]]:
        """The model's parameters that an optimizer updates, each with its group's settings."""
        return [
            (group, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._own
        ]


@dataclass(frozen=True)
class ParameterAverage:
    """An average of parameters.

    Attributes:
        fragment: The part of the model, of those that `Frequency.split` returns.
        ranks: The ranks that average, ascending.
        delay: Updates that run before the average is applied.
    """

    fragment: int
    ranks: list[int]
    delay: int = 0


class Frequency(ABC):
    """A description of when ranks exchange, and what.

    Attributes:
        exchanges: What the ranks exchange.
        swapped: How many vectors of a fragment's size two ranks send to each other for an average
            of parameters; 0 if it is an all_reduce.
    """

    exchanges: ClassVar[Exchanged]
    swapped: ClassVar[int] = 0

    @abstractmethod
    def policy(self, context: StepContext) -> StepPolicy:
        """What executes it. Collective: all ranks of the context's group call it together."""

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat; 1 if all steps have the same."""
        return 1

    @property
    def opening_steps(self) -> int:
        """Steps at the start in which it does something else than from then on."""
        return 0

    def split(self, sizes: Sequence[int]) -> list[list[int]]:
        """The parameters of each fragment that is averaged by itself: by default, one of all.

        Args:
            sizes: Elements of each parameter.

        Returns:
            Indices of the parameters of each fragment; a fragment may be empty.
        """
        return [list(range(len(sizes)))]

    def averages_after(self, step: int, ranks: int) -> list[ParameterAverage]:
        """The averages of parameters that start after a step: by default one at a cycle's end.

        Args:
            step: Number of the update, from 0, without the opening steps.
            ranks: Number of ranks.
        """
        if (step + 1) % self.cycle_steps:
            return []
        return [ParameterAverage(0, list(range(ranks)))]


@dataclass(frozen=True)
class Periodic(Frequency):
    """Ranks train alone, and exchange parameters after every `period` updates.

    Attributes:
        period: Updates from one exchange to the next.
    """

    exchanges: ClassVar[Exchanged] = "parameters"
    period: int = 1

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError("period must be at least 1")

    @property
    def cycle_steps(self) -> int:
        """Steps after which the exchanges repeat."""
        return self.period

    def exchanges_after(self, step: int) -> bool:
        """Whether parameters are exchanged after update number `step`, from 0."""
        return (step + 1) % self.period == 0


def like_parameters(
    parameters: Sequence[torch.nn.Parameter], saved: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Saved tensors with the shapes, types and devices of the parameters.

    Raises:
        ValueError: The shapes differ.
    """
    if [tuple(t.shape) for t in saved] != [tuple(p.shape) for p in parameters]:
        raise ValueError("its parameters have other shapes, or are split in another way")
    return [
        tensor.detach().to(parameter.device, parameter.dtype, copy=True)
        for tensor, parameter in zip(saved, parameters, strict=True)
    ]
