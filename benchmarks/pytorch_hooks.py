"""PyTorch's own communication hooks beside the same techniques of ddltrace, on the same training.

Each row trains one network twice from the same weights, on the same batches: with a hook of
`torch.distributed.algorithms` on DistributedDataParallel, and with the strategy. It prints the
largest difference between their parameters, how far the compression alone has moved the
parameters from plain DDP's, and how far training has moved them from their start. Use::

    torchrun --nproc-per-node 4 benchmarks/pytorch_hooks.py [--steps 30]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ddltrace.experiments.engine.attach import attach
from ddltrace.experiments.strategy.spec import parse

Step = Callable[[nn.Module], None]
"""Called with the model after each optimizer step."""


@dataclass(frozen=True)
class Case:
    """One technique and PyTorch's implementation of it.

    Attributes:
        spec: The strategy.
        register: Registers PyTorch's on a model; what it returns is called after each step.
    """

    spec: str
    register: Callable[[DistributedDataParallel], Step]


def _nothing(model: nn.Module) -> None:
    del model


def _compress(hook: Any) -> Callable[[DistributedDataParallel], Step]:
    def register(ddp: DistributedDataParallel) -> Step:
        ddp.register_comm_hook(None, hook)
        return _nothing

    return register


def _power_sgd(rank: int, start: int, *, feedback: bool) -> Callable[..., Step]:
    def register(ddp: DistributedDataParallel) -> Step:
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            use_error_feedback=feedback,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return _nothing

    return register


def _post_local(start: int, period: int) -> Callable[[DistributedDataParallel], Step]:
    def register(ddp: DistributedDataParallel) -> Step:
        state = post_localSGD_hook.PostLocalSGDState(
            process_group=None,
            subgroup=dist.new_group([dist.get_rank()], use_local_synchronization=True),
            start_localSGD_iter=start,
            post_local_gradient_allreduce=False,
        )
        ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=start)
        return lambda model: averager.average_parameters(model.parameters())

    return register


# PyTorch keeps PowerSGD's residuals by bucket, and DDP orders its buckets anew after the first
# step: from the second step on, both keep the same.
CASES: Final = (
    Case("fp16", _compress(default_hooks.fp16_compress_hook)),
    # DDP refuses this hook by its name on the CPU, where it works all the same.
    Case("bf16", _compress(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))),  # noqa: PLW0108
    Case("powersgd:rank=1,start=2+feedback", _power_sgd(1, 2, feedback=True)),
    Case("powersgd:rank=2,start=2+feedback", _power_sgd(2, 2, feedback=True)),
    Case("powersgd:rank=2,start=2", _power_sgd(2, 2, feedback=False)),
    Case("postlocalsgd:start=4,period=3", _post_local(4, 3)),
)


@dataclass(frozen=True)
class Difference:
    """Largest differences between the parameters of two models.

    Attributes:
        hook: Between PyTorch's implementation and the strategy.
        plain: Between the strategy and plain DDP.
        moved: Between the strategy and the weights from which it started.
    """

    hook: float
    plain: float
    moved: float


def network() -> nn.Module:
    """A small CNN, the same on all ranks; the shapes of its matrices differ."""
    torch.manual_seed(5)
    layers = (nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Conv2d(16, 24, 3), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(384, 40), nn.Tanh(), nn.Linear(40, 10))


def final(steps: int, prepare: Callable[[nn.Module], tuple[nn.Module, Step]]) -> torch.Tensor:
    """The parameters after a training.

    Args:
        steps: Number of steps.
        prepare: Given the network, returns what the job calls and what follows each step.
    """
    model = network()
    called, after_step = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(8, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(called(inputs), targets).backward()
        optimizer.step()
        after_step(model)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def difference_of(case: Case, steps: int) -> Difference:
    """Trains with a case's two implementations and with plain DDP. Collective.

    Args:
        case: The technique.
        steps: Number of steps.
    """

    def with_hook(model: nn.Module) -> tuple[nn.Module, Step]:
        ddp = DistributedDataParallel(model)
        return ddp, case.register(ddp)

    def with_strategy(model: nn.Module) -> tuple[nn.Module, Step]:
        attached.append(attach(model, parse(case.spec)))
        return attached[0].model, _nothing

    attached: list[Any] = []
    own = final(steps, with_strategy)
    attached[0].close()
    hook = final(steps, with_hook)
    plain = final(steps, lambda model: (DistributedDataParallel(model), _nothing))
    begin = torch.cat([parameter.detach().reshape(-1) for parameter in network().parameters()])
    return Difference(*(float((own - other).abs().max()) for other in (hook, plain, begin)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        found = difference_of(case, steps)
        if dist.get_rank() == 0:
            print(
                f"{case.spec:34} to PyTorch's hook {found.hook:.1e}, to plain DDP "
                f"{found.plain:.1e}, training moved {found.moved:.1e}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
