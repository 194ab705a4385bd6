"""Floating-point operations of recorded operators: `tracer/interpose/flops.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ddltrace.tracer.interpose.flops import Formula, count_flops, load_formulas


def convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding="same", dilation=2, groups=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 16 * 16, 10),
    )
    model(torch.randn(4, 3, 16, 16, requires_grad=True)).sum().backward()
    nn.Conv1d(4, 6, 3, dilation=2)(torch.randn(2, 4, 20)).sum().backward()
    nn.Conv3d(1, 2, (1, 2, 3))(torch.randn(1, 1, 4, 5, 6)).sum().backward()


def attention() -> None:
    query, key, value = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        functional.scaled_dot_product_attention(query, key, value).sum().backward()


def products() -> None:
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    torch.baddbmm(torch.randn(2, 3, 3), left, right, beta=0.5, alpha=2)
    torch.bmm(left, right, out=torch.empty(2, 3, 3))
    torch.addmm(torch.randn(3), left[0], right[0], alpha=3)
    torch.einsum("bij,bjk->bik", left, right)
    torch.mm(left[0].bfloat16(), right[0].bfloat16())


def repeated() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    batch = torch.randn(2, 5, 32, requires_grad=True)
    checkpoint(layer, batch, use_reentrant=False).sum().backward()


def recorded(work: Callable[[], None]) -> Sequence[Any]:
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    profiler.start()
    work()
    profiler.stop()
    events: Sequence[Any] = profiler.profiler.kineto_results.events()
    return events


@pytest.mark.parametrize("work", [convolutions, attention, products, repeated])
def test_they_are_those_of_pytorchs_counter(work: Callable[[], None]) -> None:
    with FlopCounterMode(display=False) as counter:
        work()
    events = recorded(work)
    found = count_flops(events, load_formulas())
    assert sum(found.values()) == counter.get_total_flops() > 0
    assert {events[place].name() for place in found} <= set(load_formulas())


def test_an_operator_that_cannot_be_counted_is_an_error() -> None:
    formulas = {**load_formulas(), "aten::bmm": Formula(lambda *_, **__: 1 // 0, 2)}
    with pytest.raises(ZeroDivisionError):
        count_flops(recorded(products), formulas)
