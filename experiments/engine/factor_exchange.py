"""Sufficient-factor broadcasting: ranks exchange the factors of a dense layer's gradient.

The gradient of ``nn.Linear.weight`` is the sum over the rows of a batch of outer products of
the output's gradient and the input. This exchange gathers both from all ranks and computes the
sum on each rank; the pure schedule `Poseidon` decides for which tensors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ddltrace.experiments.messages.message_exchange import AllReduce, Handle, MessageExchange
from ddltrace.experiments.messages.message_plan import Message
from ddltrace.experiments.messages.trace_marks import carrying
from ddltrace.experiments.schedules.poseidon import Poseidon
from ddltrace.tracer.codec_events import record_codec

_FAILURES_IN_A_ROW: Final = 3
_ROUNDING: Final = 8.0


class FactorExchange(MessageExchange):
    """Averages gradients by all-reduce, or by factors where the schedule's rule says so.

    At the first gradient of a step the ranks agree by one small all-reduce on the largest number
    of rows of each layer, so all of them apply the rule to the same numbers; a rank with fewer
    rows pads with zeros. Each rank also checks that its factors really give its gradient. They
    do not if the weight was used outside its layer's forward, if a hook changed the gradient, or
    if a value is inf or NaN. The result of the check travels with the factors; if it fails
    on one rank, all ranks average this gradient by all-reduce when they wait for it.

    That all-reduce is launched by `Handle.wait`. It needs no group of its own: `Poseidon` waits
    before the update, so every message of a step starts before the first wait.

    The input of each layer is held until the layer's backward pass, also where activation
    checkpointing would free it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Poseidon,
        model: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
    ) -> None:
        """Starts observing the model's dense layers.

        Args:
            group: The ranks.
            schedule: Decides for each tensor.
            model: The module that is trained.
            parameters: The trainable parameters with their names, the same on all ranks.
        """
        super().__init__(group)
        self._schedule = schedule
        self._all_reduce = AllReduce(group)
        self._layers = _dense_layers(model, [parameter for _, parameter in parameters])
        self._by_module = {id(layer.module): layer for layer in self._layers.values()}
        self._agreed: torch.Tensor | None = None
        self._agreement: dist.Work | None = None
        self._rows: dict[int, int] = {}
        # One global hook: hooks of a module would travel with its copies and pickles.
        self._hook = register_module_forward_hook(self._after_forward, with_kwargs=True)

    def begin_step(self) -> None:
        """Starts to agree on the numbers of rows."""
        if not self._layers:
            return
        rows = torch.tensor([layer.rows for layer in self._layers.values()], dtype=torch.int64)
        self._agreed = rows.to(next(iter(self._layers.values())).weight.device)
        with carrying("rows of factors", ()):
            self._agreement = dist.all_reduce(
                self._agreed, op=dist.ReduceOp.MAX, group=self.group, async_op=True
            )

    def start(self, message: Message, payload: torch.Tensor) -> Handle:
        """Launches one all_gather of factors, or the all_reduce."""
        index = message.slices[0].gradient
        layer = self._layers.get(index)
        if layer is None:
            return self._all_reduce.start(message, payload)
        rows = self._agreed_rows(index)
        captured = layer.take()
        shape = tuple(layer.weight.shape)
        if layer.failures >= _FAILURES_IN_A_ROW or not self._schedule.sends_factors(
            shape, rows, self.group.size()
        ):
            return self._all_reduce.start(message, payload)
        begin = time.monotonic_ns()
        own = _pack(captured, payload.view(shape), layer.probe(), rows)
        record_codec("encode", begin, payload.nbytes, own.nbytes)
        gathered = own.new_empty(self.group.size(), own.numel())
        work = dist.all_gather(list(gathered), own, group=self.group, async_op=True)
        assert work is not None
        return _Gathered(self._all_reduce, message, payload, work, gathered, layer, rows)

    def close(self) -> None:
        """Ends watching."""
        self._hook.remove()

    def _agreed_rows(self, index: int) -> int:
        if self._agreement is not None:
            assert self._agreed is not None
            self._agreement.wait()
            self._agreement = None
            self._rows = dict(zip(self._layers, self._agreed.tolist(), strict=True))
        return self._rows[index]

    def _after_forward(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        layer = self._by_module.get(id(module))
        if layer is None or torch.compiler.is_compiling():
            return
        inputs = args[0] if args else kwargs.get("input")
        weight = layer.weight
        if (
            not isinstance(inputs, torch.Tensor)
            or not isinstance(output, torch.Tensor)
            or not output.requires_grad
            # Autocast computes in another element type than that of the weight.
            or not inputs.dtype == output.dtype == weight.dtype
            # A subclass of nn.Linear may do something else in its forward.
            or (*inputs.shape[:-1], *weight.shape) != (*output.shape, inputs.shape[-1])
        ):
            return
        used = inputs.detach().reshape(-1, weight.shape[1])
        layer.rows += len(used)
        if not self._schedule.sends_factors(tuple(weight.shape), layer.rows, self.group.size()):
            # Too many rows for factors on all ranks: do not keep inputs.
            layer.pairs.clear()
            return

        def capture(gradient: torch.Tensor) -> None:
            layer.pairs.append((gradient.detach().reshape(-1, weight.shape[0]), used))

        # An in-place operation on a view, as that of inputs with more than two dimensions is,
        # takes the view's hooks out of the graph, but not those of its base.
        base = output._base
        if base is not None and base.requires_grad and base.numel() == output.numel():
            output = base
        output.register_hook(capture)  # type: ignore[no-untyped-call]


class _DenseLayer:
    """One dense layer and its factors since the last exchange.

    Attributes:
        module: The layer.
        weight: Its weight, of outputs x inputs elements.
        rows: Rows that went through its forward pass.
        pairs: Output gradients (rows x outputs) and inputs (rows x inputs) of each use.
        failures: Steps in a row in which the factors of some rank did not give its gradient.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.weight = module.weight
        self.rows = 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.failures = 0
        self._probe: torch.Tensor | None = None

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the factors and resets the layer."""
        pairs, self.pairs, self.rows = self.pairs, [], 0
        return pairs

    def probe(self) -> torch.Tensor:
        """A vector of random signs, one for each input."""
        if self._probe is None:
            # A separate generator, so that the job's random numbers do not change.
            own = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (self.weight.shape[1],), generator=own) * 2 - 1
            self._probe = signs.to(self.weight)
        return self._probe


@dataclass
class _Gathered:
    """Factors in flight.

    Attributes:
        all_reduce: Averages the gradient if the factors do not give it.
        message: The message.
        payload: This rank's gradient, flat; becomes the average.
        work: The all_gather.
        gathered: Results of `_pack`, one row for each rank.
        layer: The layer.
        rows: Rows that each rank has sent.
    """

    all_reduce: AllReduce
    message: Message
    payload: torch.Tensor
    work: dist.Work
    gathered: torch.Tensor
    layer: _DenseLayer
    rows: int

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """The average: the sum of all ranks' outer products, or that of the all_reduce."""
        self.work.wait()
        ranks = self.all_reduce.group.size()
        outputs, inputs = self.layer.weight.shape
        by_rank = self.gathered
        if not bool((by_rank[:, 0] == 1).all()):
            self.layer.failures += 1
            return self.all_reduce.start(self.message, self.payload).wait()
        self.layer.failures = 0
        begin = time.monotonic_ns()
        split = 1 + self.rows * outputs
        gradients = by_rank[:, 1:split].reshape(ranks * self.rows, outputs)
        used = by_rank[:, split:].reshape(ranks * self.rows, inputs)
        average = self.payload.view(outputs, inputs)
        torch.mm(gradients.T, used, out=average)
        average.div_(ranks)
        record_codec("decode", begin, self.gathered.nbytes, self.payload.nbytes)
        return self.payload


@torch.no_grad()
def _pack(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    gradient: torch.Tensor,
    probe: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """The payload of one rank: whether its factors give its gradient, then the factors.

    Args:
        pairs: Output gradients and inputs of this rank.
        gradient: Its gradient, outputs x inputs.
        probe: A vector with which factors and gradient are multiplied, to compare them.
        rows: Rows to send; those that this rank lacks are zero.

    Returns:
        1 + rows x outputs + rows x inputs elements: 1 or 0, output gradients, inputs.
    """
    outputs, inputs = gradient.shape
    packed = gradient.new_zeros(1 + rows * (outputs + inputs))
    if sum(len(used) for _, used in pairs) > rows:
        return packed
    split = 1 + rows * outputs
    gradients = packed[1:split].view(rows, outputs)
    inputs_used = packed[split:].view(rows, inputs)
    at = 0
    for output_gradient, used in pairs:
        gradients[at : at + len(used)] = output_gradient
        inputs_used[at : at + len(used)] = used
        at += len(used)
    # Sums of `rows` and of `inputs` products round by about the square root of their number.
    epsilon = torch.finfo(gradient.dtype).eps * (rows + inputs) ** 0.5
    allowed = _ROUNDING * epsilon * gradients.norm() * inputs_used.norm()
    difference: torch.Tensor = gradient @ probe - gradients.T @ (inputs_used @ probe)
    # A comparison with NaN is false, and that of inf with inf fails by inf - inf = NaN.
    packed[0] = ((difference.norm() <= allowed) & allowed.isfinite()).to(packed.dtype)
    return packed


def _dense_layers(model: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[int, _DenseLayer]:
    """Dense layers whose weight is trained in single or double precision and not shared.

    Returns:
        The layers by the index of their weight in the parameters.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = {
        index_of[id(module.weight)]: _DenseLayer(module)
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and id(module.weight) in index_of
        and holders[id(module.weight)] == 1
        and module.weight.numel() > 0
        # The check of the factors must distinguish rounding from errors.
        and module.weight.dtype in (torch.float32, torch.float64)
    }
    return dict(sorted(found.items()))
