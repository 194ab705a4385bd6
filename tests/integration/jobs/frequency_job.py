"""Two ranks train with every frequency; rank 0 writes what came out.

Started by test_frequency.py: torchrun frequency_job.py OUTPUT
"""

import copy
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.frequency import demo as decoupled_momentum
from ddltrace.experiments.frequency.demo import Demo
from ddltrace.experiments.strategy.spec import parse

STEPS = 12
SIMULATED = (
    *(("ddp", "sgd"), ("localsgd:period=3", "momentum"), ("diloco:period=4", "adamw")),
    *(("topk:density=0.1+feedback", "momentum"), ("dgc:density=0.2", "momentum")),
    *(("onebit+feedback", "momentum"), ("int8:block=64", "adamw"), ("signsgd+feedback", "sgd")),
    *(("powersgd:rank=1+feedback", "momentum"), ("lars", "momentum"), ("demo", "sgd")),
    *(("doublesqueeze", "sgd"), ("randomk:density=0.1+feedback", "sgd")),
    ("streaming_diloco:period=6,fragments=3,delay=2", "adamw"),
    ("diloco:period=4+topk:density=0.1,chunk=64,bits=2+feedback:decay=0.95", "adamw"),
)
"""Strategies whose parameters the simulated ranks of the benchmark have to reach exactly."""


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * step + rank)
    return torch.randn(6, 1, 4, 4, generator=generator)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def trained(spec: str, kind: str, steps: int = STEPS) -> tuple[torch.Tensor, list[bool]]:
    """Final parameters of this rank, and after which steps the replicas were the same."""
    model = network()
    optimizer = optimizer_of(model, kind)
    exchange = attach(model, parse(spec))
    equal = []
    for step in range(steps):
        optimizer.zero_grad()
        exchange.model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        equal.append(replicas_equal(model))
    exchange.close()
    return flat(model), equal


def replicas_equal(model: nn.Module) -> bool:
    own = flat(model)
    copies = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, own)
    return all(torch.equal(other, copies[0]) for other in copies)


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


def large_batch(steps: int) -> torch.Tensor:
    """Every update on the mean of `steps` batches of both ranks, without any exchange."""
    model = network()
    optimizer = optimizer_of(model, "momentum")
    for step in range(STEPS):
        for rank in range(dist.get_world_size()):
            share = steps * dist.get_world_size()
            (model(batch(step, rank)).square().mean() / share).backward()
        if (step + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def dion_by_its_formulas(rank: int) -> torch.Tensor:
    """Dion on the mean gradients of both ranks, in one process."""
    model = network()
    hidden = [model[0].weight, model[3].weight]
    others = [p for p in model.parameters() if not any(p is each for each in hidden)]
    adamw = torch.optim.AdamW(others, lr=0.01)
    momenta = [torch.zeros_like(weight).flatten(1) for weight in hidden]
    rights = []
    for momentum in momenta:
        rows, columns = momentum.shape
        generator = torch.Generator().manual_seed(columns)
        rights.append(torch.randn(columns, min(rank, rows, columns), generator=generator))
    for step in range(STEPS):
        model.zero_grad()
        for each in range(dist.get_world_size()):
            share = dist.get_world_size()
            (model(batch(step, each)).square().mean() / share).backward()
        with torch.no_grad():
            for place, (weight, momentum) in enumerate(zip(hidden, momenta, strict=True)):
                momentum.add_(weight.grad.flatten(1))
                left = torch.linalg.qr(momentum @ rights[place]).Q
                right = momentum.t() @ left
                momentum.sub_(0.05 * left @ right.t())
                rights[place] = right / right.norm(dim=0)
                rows, columns = momentum.shape
                weight.mul_(1 - 0.01 * 0.01)
                update = (rows / columns) ** 0.5 * left @ rights[place].t()
                weight.sub_(0.01 * update.view(weight.shape))
        adamw.step()
    return flat(model)


def beside_pytorchs_hooks(report: dict[str, Any]) -> None:
    """PyTorch's implementations and ours train the same models to the same parameters."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
    import pytorch_hooks

    for case in pytorch_hooks.CASES:
        found = pytorch_hooks.difference_of(case, STEPS)
        report["distance"][f"{case.spec} = PyTorch's"] = found.hook
        report["compression"][case.spec] = found.plain


def dgc_momentum(report: dict[str, Any]) -> None:
    """DGC that sends everything, without masking, is SGD with momentum, not with twice that."""
    finals = [trained(spec, "momentum")[0] for spec in ("dgc:density=1,masking=false", "ddp")]
    report["distance"]["dgc of density 1 = momentum SGD"] = distance(*finals)


def demo_properties() -> dict[str, float]:
    """All coefficients kept and one rank: sign-SGD of the momentum; sent + kept is conserved."""
    demo = Demo(chunk=8, k=5, beta=0.9)
    conserved, inverse = 0.0, 0.0
    for shape in ((24, 40), (7,), (), (6, 2, 3, 3), (16, 16)):
        tensor = torch.randn(shape)
        coefficients = decoupled_momentum.transformed(tensor, demo)
        back = decoupled_momentum.transformed_back(coefficients, tensor.shape, demo)
        inverse = max(inverse, distance(back, tensor))
        energy = float(coefficients.norm() - tensor.norm())
        conserved = max(conserved, abs(energy))
    return {"inverse": inverse, "energy": conserved}


def demo_sign(report: dict[str, Any]) -> None:
    """With all coefficients kept, both ranks move by the sign of their mean gradient."""
    model = network()
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    reference = copy.deepcopy(model)
    exchange = attach(model, parse("demo:k=4096,beta=0.5"))
    mean = torch.zeros_like(before)
    for rank in range(dist.get_world_size()):
        reference.zero_grad()
        reference(batch(0, rank)).square().mean().backward()
        mean += torch.cat(
            [p.grad.reshape(-1) for p in reference.parameters() if p.grad is not None]
        )
    optimizer.zero_grad()
    exchange.model(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    expected = before * (1 - 0.1 * 0.5) - 0.1 * mean.sign()
    clear = mean.abs() > 1e-6  # the sign of a zero is up to rounding
    report["demo_sign"] = distance(flat(model)[clear], expected[clear])
    left = max(float(state["ddltrace_momentum"].abs().max()) for state in optimizer.state.values())
    report["demo_left"] = left
    exchange.close()


def demo_senders(report: dict[str, Any]) -> None:
    """A coefficient is averaged over the ranks that sent it, as in the code of DeMo's authors."""
    demo = Demo(chunk=8, k=2, beta=0.5)
    model = network()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = attach(model, parse("demo:chunk=8,k=2,beta=0.5"))
    sums = [decoupled_momentum.transformed(torch.zeros_like(p), demo) for p in model.parameters()]
    counts = [torch.zeros_like(coefficients) for coefficients in sums]
    for rank in range(dist.get_world_size()):
        reference.zero_grad()
        reference(batch(0, rank)).square().mean().backward()
        for parameter, total, count in zip(reference.parameters(), sums, counts, strict=True):
            assert parameter.grad is not None
            coefficients = decoupled_momentum.transformed(parameter.grad, demo)
            for row in range(len(coefficients)):
                for column in coefficients[row].abs().argsort(descending=True)[:2].tolist():
                    total[row, column] += coefficients[row, column]
                    count[row, column] += 1
    optimizer.zero_grad()
    exchange.model(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    worst, alone = 0.0, 0
    for parameter, start, total, count in zip(
        model.parameters(), reference.parameters(), sums, counts, strict=True
    ):
        direction = decoupled_momentum.transformed_back(
            total / count.clamp(min=1), parameter.shape, demo
        )
        clear = direction.abs() > 1e-6
        difference = parameter.detach() - (start.detach() - 0.1 * direction.sign())
        worst = max(worst, float(difference[clear].abs().max()))
        alone += int((count == 1).sum())
    report["demo_senders"], report["demo_alone"] = worst, alone
    exchange.close()


def several_models(report: dict[str, Any]) -> None:
    """One optimizer of eight models does what eight optimizers do."""
    # Objects get other addresses on each rank, and so another order in sets.
    elsewhere = [bytearray(1 << 12) for _ in range(100 * dist.get_rank())]
    for spec in ("demo", "localsgd:period=2"):
        found = []
        for together in (True, False):
            torch.manual_seed(4)
            models = [nn.Linear(4, outputs) for outputs in range(1, 9)]
            exchanges = [attach(model, parse(spec)) for model in models]
            groups = [list(model.parameters()) for model in models]
            parts = [list(itertools.chain(*groups))] if together else groups
            optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
            for step in range(4):
                inputs = batch(step, dist.get_rank()).view(-1, 4)
                sum(each.model(inputs).square().mean() for each in exchanges).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for each in exchanges:
                each.close()
            found.append(torch.cat([flat(model) for model in models]))
        report["distance"][f"{spec}: one optimizer = several"] = distance(*found)
    del elsewhere


def main() -> None:
    dist.init_process_group("gloo")
    report: dict[str, Any] = {"distance": {}, "equal": {}, "compression": {}}
    found: dict[str, torch.Tensor] = {}
    for spec, kind in (
        *(("ddp", "sgd"), ("localsgd:period=1", "sgd"), ("localsgd:period=3", "momentum")),
        *(("diloco:period=3,outer_lr=1,outer_momentum=0", "momentum"),),
        *(("localsgd:period=4+topk:density=1", "adamw"), ("localsgd:period=4", "adamw")),
        *(("localsgd:period=4+qsgd", "adamw"), ("localsgd:period=3+int8:block=64", "momentum")),
        *(("diloco:period=4", "adamw"), ("diloco:period=4+topk:density=0.1+feedback", "adamw")),
        *(("streaming_diloco:period=4,fragments=1,delay=0,alpha=1", "adamw"),),
        *(("streaming_diloco:period=6,fragments=3,delay=2", "adamw"),),
        *(("streaming_diloco:period=6,fragments=3,delay=0,alpha=1", "adamw"),),
        *(("streaming_diloco:period=4,fragments=2+onebit+feedback", "adamw"), ("demo", "sgd")),
        *(("diloco:period=4,outer_lr=0.5+topk:density=1+feedback", "adamw"),),
        *(("diloco:period=4,outer_lr=0.5,outer_momentum=0", "adamw"),),
        *(("accumulate:steps=3", "momentum"), ("accumulate:steps=3+p3:slice=50", "momentum")),
        *(("postlocalsgd:start=4,period=3", "momentum"), ("dion:rank=3", "adamw")),
        *(("noloco:period=3,outer_lr=1,outer_momentum=0,pull=1", "momentum"),),
        *(("noloco:period=4", "adamw"), ("muon", "adamw"), ("muloco", "adamw")),
    ):
        final, equal = trained(spec, kind)
        found[f"{spec} {kind}"] = final
        report["equal"][f"{spec} {kind}"] = equal
    report["simulated"] = {}
    for spec, kind in SIMULATED:
        key = f"{spec} {kind}"
        final = found[key] if key in found else trained(spec, kind)[0]
        report["simulated"][key] = final.tolist()
    found["large batch"] = large_batch(3)
    found["dion by its formulas"] = dion_by_its_formulas(rank=3)
    for left, right in (
        ("localsgd:period=1 sgd", "ddp sgd"),
        ("diloco:period=3,outer_lr=1,outer_momentum=0 momentum", "localsgd:period=3 momentum"),
        ("localsgd:period=4+topk:density=1 adamw", "localsgd:period=4 adamw"),
        ("streaming_diloco:period=4,fragments=1,delay=0,alpha=1 adamw", "diloco:period=4 adamw"),
        ("accumulate:steps=3 momentum", "large batch"),
        ("dion:rank=3 adamw", "dion by its formulas"),
        (
            "noloco:period=3,outer_lr=1,outer_momentum=0,pull=1 momentum",
            "localsgd:period=3 momentum",
        ),
        ("accumulate:steps=3+p3:slice=50 momentum", "large batch"),
        (
            "diloco:period=4,outer_lr=0.5+topk:density=1+feedback adamw",
            "diloco:period=4,outer_lr=0.5,outer_momentum=0 adamw",
        ),
    ):
        report["distance"][f"{left} = {right}"] = distance(found[left], found[right])
    beside_pytorchs_hooks(report)
    dgc_momentum(report)
    report["moved"] = distance(found["ddp sgd"], flat(network()))
    report["demo"] = demo_properties()
    demo_sign(report)
    demo_senders(report)
    several_models(report)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
