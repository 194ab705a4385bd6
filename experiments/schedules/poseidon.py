"""Poseidon: wait-free backpropagation, and sufficient factors where they are smaller.

Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning
on GPU Clusters", USENIX ATC 2017, sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan
from ddltrace.experiments.schedules.base import Dispatcher, InTurn, Schedule
from ddltrace.experiments.schedules.wait_free import WaitFree
from ddltrace.experiments.technique import technique


@technique(
    "order",
    "poseidon",
    "as wfbp; dense layers exchange the factors of their gradients where these are smaller",
    "Poseidon, ATC 2017",
    needs=("nn.Linear layers in float32 or float64 for the factors; else it is wfbp",),
)
@dataclass(frozen=True)
class Poseidon(Schedule):
    """One message a tensor, as soon as its gradient is ready; dense layers may send factors.

    The gradient of a dense layer is the sum of K outer products of an output gradient and an
    input. Where `sends_factors` says so, the ranks exchange these K pairs of vectors, and each
    rank computes the sum. All other gradients are averaged by an all-reduce.
    """

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        """One message a tensor, in the order in which the gradients are created."""
        return WaitFree().plan(gradients)

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        """Lets each message go as soon as its turn and its gradient have come."""
        return InTurn(plan)

    def sends_factors(self, shape: tuple[int, ...], rows: int, workers: int) -> bool:
        """The rule of the paper for one tensor (algorithm 1, HybComm).

        With K rows, P1 workers, P2 servers and a weight of M x N elements, factors are sent
        if 2 K (P1 - 1) (M + N) < 2 M N (P1 + P2 - 2) / P2. There are no servers here: in a
        ring all-reduce each rank owns one share of the gradient as a server does, so P1 = P2.

        Args:
            shape: Shape of the gradient. Only matrices have factors.
            rows: K: pairs of vectors of one rank in this step, the most over all ranks.
            workers: Number of ranks.

        Returns:
            Whether the factors are exchanged in place of the gradient.
        """
        if len(shape) != 2 or rows < 1:
            return False
        outputs, inputs = shape
        servers = workers
        factors = 2 * rows * (workers - 1) * (outputs + inputs)
        return factors * servers < 2 * outputs * inputs * (workers + servers - 2)
