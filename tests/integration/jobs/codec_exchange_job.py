"""Three ranks average tensors in encoded form in every way; rank 0 writes what came out.

Started by test_codec_exchange.py: torchrun codec_exchange_job.py OUTPUT
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddltrace.experiments.codecs.codec_exchange import AllToAllForm, CodecExchange
from ddltrace.experiments.codecs.feedback import FeedbackCodec, compose
from ddltrace.experiments.codecs.power_sgd import PowerSgd
from ddltrace.experiments.messages.message_plan import Gradient, MessagePlan, whole
from ddltrace.experiments.observation.wire_bytes import tcp_bytes_sent
from ddltrace.experiments.strategy.spec import parse

SPECS = (
    *("fp16", "bf16", "int8:block=64", "onebit", "onebit+feedback", "signsgd", "doublesqueeze"),
    *(
        "signsgd+feedback",
        "qsgd:s=4",
        "qsgd:s=200",
        "ternary",
        "topk:density=0.1",
        "qsgd+feedback",
        "ternary+feedback",
    ),
    *("topk:density=1", "topk:density=0.1+feedback", "dgc:density=0.05", "randomk:density=0.1"),
    *("randomk:density=0.1+feedback", "powersgd:rank=2", "powersgd:rank=1+feedback"),
    *("topk:density=0.1+doublesqueeze", "int8:block=64+doublesqueeze"),
    "topk:density=0.1,chunk=100,bits=2+feedback",
    *("fp8:block=64", "fp8:form=e5m2", "int4", "int4+feedback", "thc", "thc:block=64+feedback"),
)
SHAPES = ((40, 30), (1,), (7,), (), (8, 3, 3, 3), (513,), (2, 2))
STEPS = 6
WIRE_ELEMENTS = 300_000


class Groups:
    """The same ranks twice."""

    def __init__(self, ranks: list[int]) -> None:
        self.first, self.second = dist.new_group(ranks), dist.new_group(ranks)
        self.size = len(ranks)


def exchange_of(spec: str, groups: Groups, shapes: Any) -> tuple[CodecExchange, MessagePlan]:
    strategy = parse(spec)
    gradients = [
        Gradient(index, f"p{index}", math.prod(shape), shape=shape)
        for index, shape in enumerate(shapes)
    ]
    exchange = CodecExchange(strategy.codec, strategy.feedback, groups.first, groups.second)
    exchange.prepare({gradient.index: gradient for gradient in gradients})
    return exchange, MessagePlan(gradients, [[whole(gradient) for gradient in gradients]])


def own_gradient(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    elements = sum(math.prod(shape) for shape in SHAPES)
    return torch.randn(elements, generator=generator).to(dtype)


def residuals_of(exchange: CodecExchange, ranks: int) -> torch.Tensor:
    """This rank's share of what has not been sent: on all ranks together, of their sum."""
    form: Any = exchange._form
    worker = getattr(form, "feedback", None) or form.__dict__.get("codec")
    worker = form.worker if isinstance(form, AllToAllForm) else worker
    total = torch.zeros(())
    if isinstance(worker, FeedbackCodec):
        for residual in worker.residuals.values():
            total = total + residual.double().sum()
    if isinstance(form, AllToAllForm) and isinstance(form.server, FeedbackCodec):
        for residual in form.server.residuals.values():
            total = total + residual.double().sum() * ranks
    return total.double()


def run(spec: str, groups: Groups) -> dict[str, Any]:
    rank = dist.get_rank()
    exchange, plan = exchange_of(spec, groups, SHAPES)
    (message,) = plan.messages
    identical, errors = True, []
    sent = torch.zeros((), dtype=torch.float64)
    due = torch.zeros((), dtype=torch.float64)
    for step in range(STEPS):
        mine = own_gradient(step, rank)
        mean = (
            sum((own_gradient(step, r) for r in range(groups.size)), torch.zeros(())) / groups.size
        )
        result = exchange.start(message, mine.clone()).wait().clone()
        copies = [torch.empty_like(result) for _ in range(groups.size)]
        dist.all_gather(copies, result, group=groups.first)
        identical &= all(torch.equal(copy, copies[0]) for copy in copies)
        errors.append(float((result - mean).norm() / mean.norm()))
        sent += result.double().sum() * groups.size
        due += mean.double().sum() * groups.size
    unsent = residuals_of(exchange, groups.size)
    dist.all_reduce(unsent, group=groups.first)
    found: dict[str, Any] = {
        "identical": identical,
        "errors": errors,
        "form": type(exchange._form).__name__,
        "lost": float(abs(due - sent - unsent)) / float(due.abs() + unsent.abs() + 1),
    }
    # One rank's NaN must not vanish in the average.
    broken = own_gradient(9, rank)
    if rank == 1:
        broken[600] = math.nan
    result = exchange.start(message, broken).wait()
    found["nan_seen"] = not bool(result.isfinite().all())
    result = exchange.start(message, own_gradient(10, rank)).wait()
    found["finite_after"] = bool(result.isfinite().all())
    for dtype in (torch.float64, torch.bfloat16):
        other, _ = exchange_of(spec, groups, SHAPES)
        result = other.start(message, own_gradient(0, rank, dtype)).wait()
        found[f"type_{dtype}"] = result.dtype == dtype and bool(result.isfinite().all())
    return found


def votes(groups: Groups) -> bool:
    exchange, plan = exchange_of("signsgd", groups, SHAPES)
    result = exchange.start(plan.messages[0], own_gradient(0, dist.get_rank())).wait()
    signs = sum((own_gradient(0, r) >= 0).int() * 2 - 1 for r in range(groups.size))
    assert isinstance(signs, torch.Tensor)
    return torch.equal(result, signs.sign().float())


def wire(spec: str, groups: Groups) -> dict[str, float]:
    """Bytes that the sockets saw for one tensor, and what the formula says."""
    strategy = parse(spec)
    exchange, plan = exchange_of(spec, groups, [(500, WIRE_ELEMENTS // 500)])
    description = compose(strategy.codec, strategy.feedback)
    assert description is not None
    dist.barrier(groups.first)
    before = tcp_bytes_sent()
    exchange.start(plan.messages[0], torch.randn(WIRE_ELEMENTS)).wait()
    after = tcp_bytes_sent()
    assert before is not None
    assert after is not None
    totals = torch.tensor([float(after - before)])
    dist.all_reduce(totals, group=groups.first)
    formula = description.sent_bytes(WIRE_ELEMENTS, groups.size)
    if isinstance(strategy.codec, PowerSgd):
        size = (500 + WIRE_ELEMENTS // 500) * strategy.codec.rank * 4
        formula = 2 * (groups.size - 1) * size // groups.size
    return {"sockets": float(totals) / groups.size, "formula": formula}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)  # the same on all ranks: random rounding has to differ all the same
    three, two = Groups([0, 1, 2]), Groups([0, 1])
    report: dict[str, Any] = {"three": {}, "two": {}, "wire": {}}
    for spec in SPECS:
        report["three"][spec] = run(spec, three)
        report["wire"][spec] = wire(spec, three)
        if rank < 2:
            report["two"][spec] = run(spec, two)
    report["votes"] = votes(three)
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
