"""Two ranks try the engine in every way that its tests ask about; rank 0 writes what it saw.

Started by test_experiments_engine.py: torchrun exchange_job.py OUTPUT
"""

import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.engine.refusal import StrategyRefusedError
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, Slice, whole
from ddltrace.experiments.schedules.base import Dispatcher, InTurn, Schedule
from ddltrace.experiments.schedules.ddp_buckets import DdpBuckets
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.strategy.strategy import Strategy

STEPS = 4
WARMUP = 2
DELAYED_STEPS = 7
SGDS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "dampened": {"dampening": 0.5},
    "ascent": {"maximize": True, "momentum": 0.0},
}
SPECS = (
    "fifo",
    "wfbp",
    "wfbp:wait=layer",
    "ddp:bucket_mb=0.0001",
    "fusion:cycle_ms=1",
    "fusion:threshold_mb=0.0001,cycle_ms=1",
    "p3:slice=7",
    "p3:slice=1000",
    "bytescheduler:partition_mb=0.0001,credit_mb=0.0002",
    "tictac",
    "mgwfbp:steps=1",
    "mgwfbp:steps=1,alpha_us=1e9",
)


@dataclass(frozen=True)
class Shuffled(Schedule):
    """Merges and cuts at will: gradients in reverse, in messages of 7 elements."""

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        contents: list[list[Slice]] = [[]]
        room = 7
        for gradient in reversed(gradients):
            start = 0
            while start < gradient.elements:
                stop = min(gradient.elements, start + room)
                contents[-1].append(Slice(gradient.index, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    contents.append([])
                    room = 7
        return MessagePlan(gradients, [c for c in contents if c])

    def dispatcher(self, plan: MessagePlan) -> Dispatcher:
        return InTurn(plan)


class Merged(Shuffled):
    """Everything in one message."""

    def plan(self, gradients: Sequence[Gradient]) -> MessagePlan:
        return MessagePlan(gradients, [[whole(gradient) for gradient in gradients]])


class TwoBranches(nn.Module):
    """The order of its gradients depends on the order in which its branches are called."""

    def __init__(self, *, first: str) -> None:
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 5)
        self.unused = nn.Linear(2, 2)
        self._order = ["left", "right"] if first == "left" else ["right", "left"]
        self.skip: set[str] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = [
            self.get_submodule(name)(inputs).sum(1) for name in self._order if name not in self.skip
        ]
        return torch.stack(outputs).sum(0)


class Wanderer(nn.Module):
    """Uses the weight of its layer in another place than in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3, bias=False)
        self.around = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.around:
            return nn.functional.linear(inputs, self.inner.weight)
        return self.inner(inputs)


def cnn() -> nn.Module:
    """A small network whose convolution has strided (channels-last) gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    return model.to(memory_format=torch.channels_last)


def train(strategy: Strategy, model: nn.Module, inputs: Callable[[int], torch.Tensor]) -> Any:
    """Trains a few steps with a falling rate; returns all gradients and final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    exchange = attach(model, strategy)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        exchange.model(inputs(step)).square().mean().backward()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        scheduler.step()
    exchange.close()
    return seen, [p.detach().clone() for p in model.parameters()]


def same(left: Any, right: Any) -> bool:
    """Whether two results of `train` are equal to the last bit.

    Where layers wait, there are no gradients to be seen after `finish`: parameters count.
    """
    with_gradients = all(any(side[0]) for side in (left, right))
    flat = [
        [t for part in (*(side[0] if with_gradients else ()), side[1]) for t in part]
        for side in (left, right)
    ]
    return len(flat[0]) == len(flat[1]) and all(map(torch.equal, flat[0], flat[1]))


def image(step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(8, 2, 4, 4, generator=generator)
    return made.to(memory_format=torch.channels_last)


def vector(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 6, generator=generator)


def record_messages() -> tuple[list[int], Callable[[], None]]:
    """The number of elements of every all_reduce from here on."""
    original = dist.all_reduce
    sizes: list[int] = []

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = recording

    def restore() -> None:
        dist.all_reduce = original

    return sizes, restore


def equality(report: dict[str, Any]) -> None:
    reference = train(parse("ddp"), cnn(), image)
    others = {spec: parse(spec) for spec in SPECS}
    others |= {"shuffled": Strategy("x", Shuffled()), "merged": Strategy("x", Merged())}
    report["equal_to_ddp"] = {
        name: same(train(strategy, cnn(), image), reference) for name, strategy in others.items()
    }


def order(report: dict[str, Any]) -> None:
    """The ranks' gradients come in opposite orders."""
    for spec in (
        "wfbp",
        "fusion:cycle_ms=1",
        "p3:slice=4",
        "tictac",
        "mgwfbp:steps=1,alpha_us=1e9",
    ):
        model = TwoBranches(first="left" if dist.get_rank() == 0 else "right")
        model.unused.requires_grad_(False)
        arrivals: list[str] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, n=name, a=arrivals: a.append(n)
                )
        sizes, restore = record_messages()
        _, final = train(parse(spec), model, vector)
        restore()
        gathered: list[Any] = [None] * dist.get_world_size()
        own = {"arrivals": arrivals[:4], "messages": sizes, "final": [p.tolist() for p in final]}
        dist.all_gather_object(gathered, own)
        report.setdefault("order", {})[spec] = gathered


def unused(report: dict[str, Any]) -> None:
    """Rank 1 leaves out a branch in some steps; `unused` is never used.

    In step 2, only rank 0 uses the branch, and only in a pass without an exchange.
    """

    def run(strategy: Strategy) -> Any:
        torch.manual_seed(1)
        model = TwoBranches(first="left")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        exchange = attach(model, strategy, find_unused_parameters=True)
        gradients = []
        for step in range(STEPS):
            model.skip = {"right"} if dist.get_rank() == 1 and step else set()
            optimizer.zero_grad()
            if step == 2:
                with exchange.model.no_sync():  # type: ignore[operator]
                    exchange.model(vector(20)).square().mean().backward()
                model.skip = {"right"}
            exchange.model(vector(step)).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            optimizer.step()
        exchange.close()
        report["unused_stays_none"] = model.unused.weight.grad is None
        return gradients, [p.detach().clone() for p in model.parameters()]

    reference = run(parse("ddp"))
    report["unused_equal_to_ddp"] = {
        spec: same(run(parse(spec)), reference) for spec in ("fifo", "wfbp", "wfbp:wait=layer")
    }


def misuse(report: dict[str, Any]) -> None:
    model = TwoBranches(first="left")
    exchange = attach(model, parse("fifo"))
    report["missing"] = complaint(lambda: exchange.model(vector(0)).mean().backward())
    model.unused.requires_grad_(False)
    exchange.close()

    wanderer = Wanderer()
    exchange = attach(wanderer, parse("wfbp:wait=layer"))
    optimizer = torch.optim.SGD(wanderer.parameters(), lr=0.1)
    exchange.model(vector(0)).mean().backward()
    optimizer.step()
    wanderer.around = True
    report["around"] = complaint(lambda: exchange.model(vector(1)).mean().backward())
    exchange.close()

    exchange = attach(Wanderer(), parse("odsgd"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(exchange.model(vector(0)).mean()).backward()
    parameters = list(exchange.model.parameters())
    report["adam"] = complaint(torch.optim.Adam(parameters).step)
    report["scaler"] = complaint(lambda: scaler.step(torch.optim.SGD(parameters)))
    exchange.close()


def complaint(action: Callable[[], None]) -> str | None:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    except StrategyRefusedError as error:
        return error.reason
    return None


def delay(report: dict[str, Any]) -> None:
    """OD-SGD against its rule written out, and with readers of its parameters."""
    local, final = delayed_rule()
    model, parameters, optimizer, exchange = delayed_model()
    for step in range(DELAYED_STEPS):
        delayed_step(exchange, optimizer, step)
    exchange.model(image(0))
    found = {"local": close_to(parameters, local)}
    found["local_differs"] = not close_to(parameters, final)
    exchange.close()
    found["final"] = close_to(parameters, final)
    found["same_on_ranks"] = same_on_ranks(parameters)

    # Before the next forward pass, whatever reads the parameters gets the global weights.
    model, parameters, optimizer, exchange = delayed_model()
    for step in range(DELAYED_STEPS):
        delayed_step(exchange, optimizer, step)
    found["final_without_close"] = close_to(parameters, final)
    exchange.close()

    # A checkpoint on one rank alone, with a barrier after it.
    model, parameters, optimizer, exchange = delayed_model()
    for step in range(DELAYED_STEPS):
        delayed_step(exchange, optimizer, step)
        if step == WARMUP + 1:
            if dist.get_rank() == 0:
                model.state_dict()
            dist.barrier()
    states = [value.clone() for value in model.state_dict().values()]
    found["same_checkpoints"] = same_on_ranks(states)
    exchange.close()
    found["same_after_reading_on_one_rank"] = same_on_ranks(parameters)

    # What the job loads while an exchange runs is not undone by the update that is due.
    model, parameters, optimizer, exchange = delayed_model()
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(WARMUP + 2):
        delayed_step(exchange, optimizer, step)
    model.load_state_dict(begin)
    exchange.close()
    found["keeps_what_was_loaded"] = all(
        torch.equal(value, begin[name]) for name, value in model.state_dict().items()
    )

    # A job that clips lists the parameters between backward and the optimizer's step.
    finals = []
    for clips in (False, True):
        model, parameters, optimizer, exchange = delayed_model()
        for step in range(DELAYED_STEPS):
            delayed_step(exchange, optimizer, step, clips=clips)
        exchange.close()
        finals.append(parameters)
    found["clipped"] = close_to(*finals)

    # With the same data on all ranks, a rank's own gradient is the average.
    for name, options in SGDS.items():
        finals = []
        for spec in ("ddp", f"odsgd:warmup={WARMUP}"):
            _, parameters, optimizer, exchange = delayed_model(spec, **options)
            for step in range(DELAYED_STEPS):
                delayed_step(exchange, optimizer, step, rank=0)
            exchange.close()
            finals.append(parameters)
        found[f"same data, {name}"] = close_to(*finals)
    report["delay"] = found


def delayed_model(
    spec: str = f"odsgd:warmup={WARMUP}", **options: Any
) -> tuple[nn.Module, list[nn.Parameter], torch.optim.SGD, Any]:
    model = cnn()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})
    return model, parameters, optimizer, attach(model, parse(spec))


def delayed_step(
    exchange: Any,
    optimizer: torch.optim.SGD,
    step: int,
    rank: int | None = None,
    *,
    clips: bool = False,
) -> None:
    optimizer.param_groups[0]["lr"] = rate(step)
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    exchange.model(image(step, rank)).square().mean().backward()
    if clips:
        assert float(nn.utils.clip_grad_norm_(exchange.model.parameters(), 1e9)) > 0
    optimizer.step()


def delayed_rule() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The local copy after the last step and the global weights after all updates."""
    model = cnn()
    parameters = list(model.parameters())
    weights = [p.detach().clone() for p in parameters]
    momentum = [torch.zeros_like(p) for p in parameters]
    due: tuple[list[torch.Tensor], float] | None = None

    def update(averages: list[torch.Tensor], speed: float) -> None:
        for weight, velocity, average in zip(weights, momentum, averages, strict=True):
            velocity.mul_(0.9).add_(average)
            weight.sub_(speed * velocity)

    for step in range(DELAYED_STEPS):
        own = torch.autograd.grad(model(image(step)).square().mean(), parameters)
        averages = [gradient.clone() for gradient in own]
        for average in averages:
            dist.all_reduce(average)
            average.div_(dist.get_world_size())
        local = weights
        if step < WARMUP:
            update(averages, rate(step))
        else:
            if due is not None:
                update(*due)
            local = [
                w - rate(step) * (0.9 * v + g)
                for w, v, g in zip(weights, momentum, own, strict=True)
            ]
            due = (averages, rate(step))
        with torch.no_grad():
            for parameter, value in zip(parameters, local, strict=True):
                parameter.copy_(value)
    assert due is not None
    update(*due)
    return [p.detach() for p in parameters], weights


def rate(step: int) -> float:
    return 0.1 * 0.8**step


def close_to(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(left, right, strict=True))


def same_on_ranks(tensors: Sequence[torch.Tensor]) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [t.tolist() for t in tensors])
    return all(other == gathered[0] for other in gathered)


def reloading(report: dict[str, Any]) -> None:
    """A job goes back to an earlier checkpoint, and swaps its weights, while updates are due."""

    def run(spec: str) -> list[torch.Tensor]:
        model = cnn()
        exchange = attach(model, parse(spec))
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for step in range(6):
            if step == 2:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 4:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            optimizer.zero_grad()
            exchange.model(image(step)).square().mean().backward()
            optimizer.step()
            kept = [parameter.data.clone() for parameter in parameters]
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data = torch.zeros_like(value)
            with torch.no_grad():
                assert not model(image(step)).any()
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data = value
        exchange.close()
        return [p.detach() for p in parameters]

    reference = run("ddp")
    report["reloaded_equal_to_ddp"] = {
        spec: close_to(run(spec), reference) for spec in ("wfbp:wait=layer", "p3:slice=7")
    }


def ddp_plan(report: dict[str, Any]) -> None:
    """What `DdpBuckets.plan` says is what PyTorch's reducer does once it knows the order."""
    found = {}
    for bucket_mb in (None, 0.01, 0.5):
        torch.manual_seed(1)
        model = nn.Sequential(*stack())
        schedule = DdpBuckets(bucket_mb)
        exchange = attach(model, Strategy("ddp", schedule))
        seen: list[list[int]] = []
        exchange.model.register_comm_hook(seen, note_bucket)  # type: ignore[operator]
        arrivals: list[int] = []
        parameters = list(model.parameters())
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index, a=arrivals: a.append(i))
        for _ in range(3):
            seen.clear()
            arrivals.clear()
            exchange.model(torch.ones(2, 400)).sum().backward()
        gradients = [
            Gradient(i, str(i), parameters[i].numel()) for i in sorted(arrivals, key=arrivals.index)
        ]
        plan = schedule.plan(gradients)
        found[str(bucket_mb)] = {"real": seen[:], "planned": [m.elements for m in plan.messages]}
    report["ddp_plan"] = found


def stack() -> list[nn.Module]:
    return [*(nn.Linear(400, 400) for _ in range(4)), nn.Linear(400, 9)]


def note_bucket(seen: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    seen.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class DenseCases(nn.Module):
    """Dense layers in every way that factors have to cope with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(200, 80)
        self.twice = nn.Linear(80, 80, bias=False)
        self.shared = nn.Linear(80, 80)
        self.alias = nn.Linear(80, 80)
        self.alias.weight = self.shared.weight
        self.around = nn.Linear(80, 80)
        self.mixed = nn.Linear(80, 80)
        self.small = nn.Linear(80, 3)
        self.empty = nn.Linear(0, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.first(input=inputs).relu_()
        x = self.twice(self.twice(x).tanh()).tanh()
        x = self.alias(self.shared(x).tanh()).tanh()
        x = nn.functional.linear(x, self.around.weight, self.around.bias).tanh()
        x = self.mixed(x) + nn.functional.linear(x, self.mixed.weight)
        return self.small(x) + self.empty(x[..., :0])


def dense(step: int) -> torch.Tensor:
    """Batches of three dimensions, of other sizes on the two ranks; too large in step 3."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    batch = {3: 40, 5: 1 - dist.get_rank()}.get(step, 2 + dist.get_rank())
    return torch.randn(batch, 3, 200, generator=generator)


def train_dense(spec: str) -> dict[str, Any]:
    """Trains with single steps, accumulation, an inf, and a copy of the model in use."""
    torch.manual_seed(1)
    model = DenseCases()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    exchange = attach(model, parse(spec))
    wrapped: Any = exchange.model
    gradients, sent = [], []
    for step in range(9):
        optimizer.zero_grad()
        if step == 2:
            with wrapped.no_sync():
                wrapped(dense(20)).square().sum().backward()
        if step == 4:  # backward passes of which no gradient stays
            model(dense(21)).sum().backward()
            optimizer.zero_grad()
            copy.deepcopy(model)(dense(22)).sum().backward()
        gathered, restore = record_gathers()
        scale = float("inf") if step == 8 and dist.get_rank() == 1 else 1.0
        (wrapped(dense(step)).square().sum() * scale).backward()
        restore()
        sent.append(gathered)
        gradients.append([p.grad.clone() for p in model.parameters()])
        if step != 8:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    exchange.close()
    return {"gradients": gradients, "sent": sent, "final": list(model.parameters())}


def record_gathers() -> tuple[list[int], Callable[[], None]]:
    """The number of elements that this rank sends in every all_gather from here on."""
    original = dist.all_gather
    sizes: list[int] = []

    def recording(outputs: list[torch.Tensor], tensor: torch.Tensor, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(outputs, tensor, **kwargs)

    dist.all_gather = recording

    def restore() -> None:
        dist.all_gather = original

    return sizes, restore


def factors(report: dict[str, Any]) -> None:
    """Poseidon against DDP, in gradients of every step and in final parameters."""
    ours, plain = train_dense("poseidon"), train_dense("ddp")
    distances = []
    for mine, ddps in zip(ours["gradients"], plain["gradients"], strict=True):
        a, b = (torch.cat([g.flatten() for g in side]) for side in (mine, ddps))
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        distance = (a - b)[finite].abs().sum() / b[finite].abs().sum().clamp(min=1e-9)
        distances.append(float(distance))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [p.tolist() for p in ours["final"]])
    report["factors"] = {
        "distances": distances,
        "sent": ours["sent"],
        "replicas_equal": gathered[0] == gathered[1],
    }


def main() -> None:
    dist.init_process_group("gloo")
    report: dict[str, Any] = {}
    for part in (equality, order, unused, delay, reloading, ddp_plan, factors, misuse):
        part(report)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.destroy_process_group()


main()
