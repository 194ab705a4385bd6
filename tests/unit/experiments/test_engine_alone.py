"""The engine in a process group of one rank, in this process: which gradients an update gets."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddltrace.experiments.engine import (
    plugin,
    schedule_calibration,
    slow_rank,
    update_control,
)
from ddltrace.experiments.engine.attach import Exchange, attach
from ddltrace.experiments.engine.create_exchange import ArchitectureExchange
from ddltrace.experiments.engine.refusal import StrategyRefusedError
from ddltrace.experiments.observation import step_count
from ddltrace.experiments.strategy.job_checks import refused_optimizer
from ddltrace.experiments.strategy.spec import parse
from ddltrace.experiments.synchronization import bsp
from ddltrace.tracer.errors import UsageError
from ddltrace.tracer.record.recorder import Recorder
from ddltrace.tracer.record.step_tracker import Steps

STEPS = 8


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branched(nn.Module):
    """Two layers, the second of which a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.uses_second = True
        self.recomputes = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        if not self.uses_second:
            return hidden
        if self.recomputes:
            result: torch.Tensor = checkpoint(self.second, hidden, use_reentrant=True)
            return result
        outputs: torch.Tensor = self.second(hidden)
        return outputs


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step), requires_grad=True)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step)).square().sum()
    return loss


def branched(spec: str) -> tuple[Branched, Exchange]:
    torch.manual_seed(1)
    model = Branched()
    return model, attach(model, parse(spec), find_unused_parameters=True)


def sgd(*modules: nn.Module, **options: Any) -> torch.optim.SGD:
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


def large_batches(passes: int, clip: float | None = None) -> list[torch.Tensor]:
    """Trains without a strategy on batches of two steps, each with some backward passes."""
    torch.manual_seed(1)
    model = Branched()
    optimizer = sgd(model)
    for step in range(STEPS):
        model.uses_second = step % 2 == 0
        for number in range(passes):
            (loss_of(model, 10 * step + number) / 2).backward()
        if step % 2:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def close(left: Any, right: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_accumulation_is_a_large_batch(passes: int, clip: float | None, optimizers: int) -> None:
    model, exchange = branched("accumulate:steps=2")
    updates = [sgd(model)] if optimizers == 1 else [sgd(model.first), sgd(model.second)]
    for step in range(STEPS):
        model.uses_second = step % 2 == 0  # not in the steps that update
        for number in range(passes):
            loss_of(exchange.model, 10 * step + number).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in updates:
            optimizer.step()
            optimizer.zero_grad()
    exchange.close()
    assert close(model.parameters(), large_batches(passes, clip))


def test_accumulation_takes_what_only_a_pass_without_exchange_used() -> None:
    model, exchange = branched("accumulate:steps=2")
    wrapped: Any = exchange.model
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.uses_second = step % 2 == 0
        with wrapped.no_sync():
            loss_of(wrapped, 10 * step).backward()
        model.uses_second = False
        (loss_of(wrapped, 10 * step + 1) * 0).backward()
        optimizer.step()
    exchange.close()
    assert close(model.parameters(), large_batches(1))


@pytest.mark.parametrize("spec", ["wfbp", "topk:density=1+feedback", "accumulate:steps=1"])
def test_a_backward_pass_inside_another_does_not_end_it(spec: str) -> None:
    finals = []
    for recomputes in (False, True):
        torch.manual_seed(1)
        model = Branched()
        model.recomputes = recomputes
        exchange = attach(model, parse(spec))
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            outputs = exchange.model(batch(step).requires_grad_())
            # A gradient of outputs alone does not end the step either.
            if not recomputes:
                torch.autograd.grad(outputs.sum(), outputs, retain_graph=True)
            outputs.square().sum().backward()
            optimizer.step()
        exchange.close()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert close(*finals)


def test_a_search_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(StrategyRefusedError) as refused:
        branched("bytescheduler:tune=true")
    assert "pip install" in refused.value.reason


def test_an_empty_spec_is_no_strategy() -> None:
    with pytest.raises(UsageError, match="a name is missing"):
        plugin.check({"strategy": ""})
    plugin.check({"strategy": None})


class Recurrent(nn.Module):
    """Checkpoints that share a layer: its gradient comes in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.rounds = 3

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            inputs = checkpoint(lambda x: self.shared(x).tanh(), inputs, use_reentrant=True)
        outputs: torch.Tensor = self.head(inputs)
        return outputs


@pytest.mark.parametrize("spec", ["wfbp", "accumulate:steps=1", "topk:density=1+feedback"])
def test_a_gradient_may_come_in_parts(spec: str) -> None:
    finals = []
    for attached in (False, True):
        torch.manual_seed(1)
        model = Recurrent()
        exchange = attach(model, parse(spec)) if attached else None
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            model.rounds = 2 if step == 2 else 3  # fewer than in the first step
            loss_of(model if exchange is None else exchange.model, step).backward()
            optimizer.step()
        finals.append([p.detach().clone() for p in model.parameters()])
        if exchange is not None:
            model.rounds = 4
            with pytest.raises(StrategyRefusedError, match="1"):
                loss_of(exchange.model, 9).backward()
    assert close(*finals)


@pytest.mark.parametrize("spec", ["wfbp", "topk:density=1+feedback"])
def test_layers_that_are_frozen_by_turns_train(spec: str) -> None:
    finals = []
    for own in ("ddp", spec):
        model, exchange = branched(own)
        optimizers = [sgd(model.first), sgd(model.second)]
        for step in range(STEPS):
            model.first.requires_grad_(step % 2 == 0)
            model.second.requires_grad_(step % 2 == 1)
            loss_of(exchange.model, step).backward()
            optimizers[step % 2].step()
            optimizers[step % 2].zero_grad()
        exchange.close()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert close(*finals)


@pytest.mark.parametrize("spec", ["localsgd", "diloco", "postlocalsgd", "grouped:size=1"])
def test_two_optimizers_in_a_step_are_refused_where_parameters_are_exchanged(spec: str) -> None:
    model, exchange = branched(spec)
    first, second = sgd(model.first), sgd(model.second)
    loss_of(exchange.model, 0).backward()
    first.step()
    with pytest.raises(StrategyRefusedError) as refused:
        second.step()
    assert "several optimizers in one step" in refused.value.reason
    exchange.close()


def test_accumulation_refuses_optimizers_that_step_by_turns() -> None:
    model, exchange = branched("accumulate:steps=2")
    optimizers = [sgd(model.first), sgd(model.second)]
    for step in range(3):
        loss_of(exchange.model, step).backward()
        if step < 2:
            optimizers[step].step()
    with pytest.raises(StrategyRefusedError) as refused:
        optimizers[0].step()
    assert "by turns" in refused.value.reason
    exchange.close()


def test_a_new_optimizer_in_a_later_step_is_not_refused() -> None:
    model, exchange = branched("localsgd:period=2")
    for step in range(4):
        loss_of(exchange.model, step).backward()
        sgd(model).step()
    exchange.close()


@pytest.mark.parametrize("spec", ["accumulate", "localsgd", "diloco", "demo", "odsgd"])
def test_a_scaler_is_refused_where_ranks_step_by_their_own_gradients(spec: str) -> None:
    for enabled in (False, True):
        model, exchange = branched(spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
        scaler.scale(loss_of(exchange.model, 0)).backward()
        if not enabled:
            scaler.step(sgd(model))
        else:
            with pytest.raises(StrategyRefusedError) as refused:
                scaler.step(sgd(model))
            assert "a GradScaler skips steps" in refused.value.reason
        exchange.close()


@pytest.mark.parametrize("spec", ["lars:eta=0.1", "lamb"])
def test_a_fused_optimizers_gradients_are_unscaled_for_a_rule(spec: str) -> None:
    finals = []
    for fused in (False, True):
        model, exchange = branched(spec)
        optimizer = sgd(model, weight_decay=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(loss_of(exchange.model, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        exchange.close()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(bool(p.isfinite().all()) for p in finals[1])
    assert close(*finals)


@pytest.mark.parametrize("spec", ["lars:eta=0.1", "lamb", "demo"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam])
def test_a_techniques_own_state_goes_through_a_checkpoint(
    spec: str, kind: type[torch.optim.Optimizer]
) -> None:
    def begin() -> tuple[Branched, Exchange, torch.optim.Optimizer]:
        model, exchange = branched(spec)
        model.to(torch.bfloat16)
        return model, exchange, kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]

    def train(exchange: Exchange, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            exchange.model(batch(step).bfloat16()).square().sum().backward()
            optimizer.step()

    model, exchange, optimizer = begin()
    train(exchange, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(exchange, optimizer, range(3, 6))
    exchange.close()
    other, exchange, resumed = begin()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert saved[1]["state"] == {}
    states = [state for state in resumed.state.values() if "ddltrace_momentum" in state]
    assert all(state["ddltrace_momentum"].dtype == torch.float32 for state in states)
    train(exchange, resumed, range(3, 6))
    exchange.close()
    assert close(model.parameters(), other.parameters())
    # Without the strategy, the optimizer begins as if it had not stepped.
    plain = kind(other.parameters(), lr=0.01)  # type: ignore[call-arg]
    plain.load_state_dict(saved[1])
    other(batch(0).bfloat16()).sum().backward()
    plain.step()


def test_a_checkpoint_under_dgc_has_the_jobs_own_momentum() -> None:
    model, exchange = branched("dgc:density=1,masking=false")
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(exchange.model, step).backward()
        optimizer.step()
    exchange.close()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["momentum"] == 0.9
    assert all(entry.get("momentum_buffer") is None for entry in saved["state"].values())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_dgc_takes_the_momentum_of_the_job(momentum: float) -> None:
    finals = []
    for spec in ("ddp", "dgc:density=1,masking=false", f"dgc:density=1,momentum={momentum}"):
        model, exchange = branched(spec)
        own = 0.7 if "momentum=" in spec else momentum
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=own)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(exchange.model, step).backward()
            optimizer.step()
        exchange.close()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert close(finals[0], finals[1])
    assert close(finals[0], finals[2]) == (momentum == 0.0)  # masking forgets momentum


def test_the_synchronous_steps_of_post_local_sgd_use_the_architecture() -> None:
    _, exchange = branched("postlocalsgd+mesh+int8")
    assert exchange._taken_over is not None
    assert isinstance(exchange._taken_over.exchange._exchange, ArchitectureExchange)
    exchange.close()


def test_an_optimizer_that_cannot_be_split_trains_in_bulk_synchronous_steps() -> None:
    model, exchange = branched("bsp")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(exchange.model, 0)
        loss.backward()
        return float(loss)

    before = closure()
    optimizer.step(closure)
    assert closure() < before
    exchange.close()


def test_the_clock_of_bulk_synchronous_steps_is_in_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marks: list[str] = []
    monkeypatch.setattr(bsp, "mark", marks.append)
    model, exchange = branched("bsp")
    optimizer = sgd(model)
    for step in range(3):
        loss_of(exchange.model, step).backward()
        optimizer.step()
    exchange.close()
    assert marks[1:] == [f"sync step worker=0 clock={step}" for step in range(3)]


@pytest.mark.parametrize("spec", ["muon", "dion:rank=2", "lamb", "noloco:period=2"])
def test_the_order_of_a_weights_elements_in_memory_does_not_matter(spec: str) -> None:
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(24, 2))
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        exchange = attach(model, parse(spec))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            exchange.model(torch.randn(4, 3, 4, 4, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        exchange.close()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).abs()


@pytest.mark.parametrize(
    "spec", ["ternary", "powersgd", "ring", "lamb", "demo", "asp", "thc", "muon", "dion", "noloco"]
)
def test_complex_parameters_are_refused_where_they_cannot_be_exchanged(spec: str) -> None:
    with pytest.raises(StrategyRefusedError) as refused:
        attach(Spectral(), parse(spec))
    assert "complex parameters" in refused.value.reason


@pytest.mark.parametrize("spec", ["wfbp", "accumulate:steps=2", "localsgd:period=2"])
def test_complex_parameters_are_exchanged_as_they_are(spec: str) -> None:
    model = Spectral()
    exchange = attach(model, parse(spec))
    optimizer = sgd(model)
    for _ in range(2):
        exchange.model(torch.ones(3)).sum().backward()
        optimizer.step()
    exchange.close()
    assert bool((model.weight.detach().abs() < 1).all())


def test_updates_of_two_optimizers_are_one_step_of_a_slow_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []

    class Recorded:
        def __init__(self, *_: Any) -> None:
            pass

        def begin(self, step: int) -> None:
            begun.append(step)

    # A slow rank replaces it until the job ends; setting it here restores it after the test.
    ddp: Any = DistributedDataParallel
    monkeypatch.setattr(ddp, "__init__", ddp.__init__)
    monkeypatch.setattr(slow_rank, "Straggler", Recorded)
    steps = Steps(Recorder(100))
    session = SimpleNamespace(context=SimpleNamespace(steps=steps))
    monkeypatch.setattr(step_count, "current_session", lambda: session)
    hooks = (update_control.before_step, update_control.on_step)
    former = [list(each) for each in hooks]
    try:
        slow_rank.SlowRank(["rank=0,factor=2"]).install()
        model = Branched()
        wrapped = DistributedDataParallel(model)
        optimizers = [
            torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.second)
        ]
        for step in range(3):
            steps.begin_training(10 * step)
            wrapped(batch(step)).sum().backward()
            for number, optimizer in enumerate(optimizers):
                steps.begin_update(number, 10 * step + 1)
                optimizer.step()
                steps.end_update(10 * step + 2)
    finally:
        for each, before in zip(hooks, former, strict=True):
            each[:] = before
    assert begun == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "spec",
    [
        "bytescheduler:tune=true",
        "best_buckets",
        "best_buckets:steps=2",
        "mgwfbp:steps=3",
        "accumulate:steps=3+best_buckets:steps=1",
        "accumulate:steps=2+mgwfbp:steps=2",
    ],
)
def test_a_search_ends_in_the_last_of_the_opening_steps(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    opening = parse(spec).opening_steps
    marked: dict[str, list[int]] = {}
    sent: list[int] = []
    step = 0
    original = schedule_calibration.calibrating

    def calibrating(what: str) -> Any:
        sent.append(step)
        return original(what)

    monkeypatch.setattr(
        schedule_calibration, "mark", lambda name: marked.setdefault(name, []).append(step)
    )
    monkeypatch.setattr(schedule_calibration, "calibrating", calibrating)
    model, exchange = branched(spec)
    optimizer = sgd(model)
    for step in range(opening + 20):
        loss_of(exchange.model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.close()
    begins, ends = (marked[f"calibration: {what}"] for what in ("begins", "ends"))
    assert begins == [0]
    # An exchange of `accumulate` is in the last step of its cycle, and a timing needs no search.
    assert opening - parse(spec).cycle_steps <= ends[0] < opening
    assert len(ends) == 1
    assert max(sent) == ends[0]


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    # LBFGS needs a closure, SparseAdam sparse gradients, and Muon matrices.
    and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
]


class OwnSgd(torch.optim.SGD):
    """A subclass, as jobs have them."""


@pytest.mark.parametrize("kind", [*OPTIMIZERS, OwnSgd], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("spec", ["odsgd:warmup=0", "dgc", "ddp", "topk+feedback"])
def test_optimizers_that_the_engine_refuses_are_known_before(kind: Any, spec: str) -> None:
    model, exchange = branched(spec)
    optimizer = kind(model.parameters(), lr=0.01)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(exchange.model, 0).backward()
    known = refused_optimizer(parse(spec), [base.__name__ for base in kind.__mro__])
    if known is None:
        optimizer.step()
        return
    with pytest.raises(StrategyRefusedError) as refused:
        optimizer.step()
    assert refused.value.reason == known
    assert all(map(torch.equal, before, model.parameters()))  # before the first step
