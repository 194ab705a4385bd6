"""LARS, LAMB and Muon by the properties of their papers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ddltrace.experiments.optimizer_rules.muon import orthogonalized
from ddltrace.experiments.optimizer_rules.optimizer_rule import warmup_share
from ddltrace.experiments.strategy.spec import parse


def update(spec: str, optimizer: Optimizer) -> None:
    rule = parse(spec).optimizer_rule
    assert rule is not None
    for group in optimizer.param_groups:
        rule.update(optimizer, group, group["params"])


def parameter_with(gradient: torch.Tensor, weight: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient.clone()
    return parameter


@pytest.mark.parametrize("shape", [(1,), (7,), (4, 5), (2, 3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_of_lars_is_as_long_as_the_weights_say(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    steps = []
    for scale in (1.0, 1000.0):
        parameter = parameter_with(gradient * scale, weight)
        update("lars:eta=0.02,momentum=0", torch.optim.SGD([parameter], lr=3.0))
        steps.append((weight - parameter.detach()).float())
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-5
    wanted = 3.0 * 0.02 * weight.float().norm()
    torch.testing.assert_close(steps[0].norm(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(steps[0], steps[1], rtol=tolerance, atol=tolerance)


def test_lars_follows_its_formula_with_momentum_and_decay() -> None:
    weight = torch.randn(6, dtype=torch.float64)
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.8, weight_decay=0.01)
    expected, velocity = weight.clone(), torch.zeros(6, dtype=torch.float64)
    for _ in range(5):
        gradient = torch.randn(6, dtype=torch.float64)
        parameter.grad = gradient
        update("lars:eta=0.1", optimizer)
        rate = 0.1 * expected.norm() / (gradient.norm() + 0.01 * expected.norm())
        velocity = 0.8 * velocity + 0.5 * rate * (gradient + 0.01 * expected)
        expected = expected - velocity
    torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("spec", ["lars", "lamb"])
def test_zero_norms_give_finite_updates(spec: str) -> None:
    for weight, gradient in ((torch.zeros(3), torch.ones(3)), (torch.ones(3), torch.zeros(3))):
        parameter = parameter_with(gradient, weight)
        update(spec, torch.optim.SGD([parameter], lr=0.1))
        assert parameter.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lamb_with_a_trust_ratio_of_1_is_adamw(dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    ours = nn.Linear(5, 4, dtype=dtype)
    theirs = copy.deepcopy(ours)
    own = torch.optim.AdamW(ours.parameters(), **settings)
    other = torch.optim.AdamW(theirs.parameters(), **settings)
    for _ in range(20):
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        update("lamb:trust_min=1,trust_max=1", own)
        other.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_step_of_lamb_is_as_long_as_the_weights() -> None:
    weight = torch.randn(30)
    parameter = parameter_with(torch.randn(30), weight)
    update("lamb", torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0))
    torch.testing.assert_close((weight - parameter.detach()).norm(), 0.1 * weight.norm())


def test_the_warm_up_is_linear() -> None:
    assert [warmup_share(step, 4) for step in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert warmup_share(1, 0) == 1.0
    weight = torch.ones(4)
    parameter = parameter_with(torch.ones(4), weight)
    update("lars:eta=1,momentum=0,warmup=10", torch.optim.SGD([parameter], lr=1.0))
    torch.testing.assert_close(parameter.detach(), weight * 0.9)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_thirty_updates_are_those_of_the_papers(rule: str, decay: float) -> None:
    """LARS with the formula of arXiv 1708.03888, LAMB with algorithm 2 of 1904.00962, in numpy."""
    draw = np.random.default_rng(3)
    shapes = [(7, 5), (5,), (3, 2, 2), (1,)]
    layers = [nn.Parameter(torch.tensor(draw.normal(size=shape))) for shape in shapes]
    layers.append(nn.Parameter(torch.zeros(4, dtype=torch.float64)))  # without a norm at first
    weights = [layer.detach().numpy().copy() for layer in layers]
    first = [np.zeros_like(w) for w in weights]
    second = [np.zeros_like(w) for w in weights]
    lr, eta, momentum, betas, eps = 0.05, 0.02, 0.9, (0.9, 0.999), 1e-6
    optimizer: Optimizer = (
        torch.optim.SGD(layers, lr=lr, momentum=momentum, weight_decay=decay)
        if rule == "lars"
        else torch.optim.AdamW(layers, lr=lr, betas=betas, eps=eps, weight_decay=decay)
    )
    for step in range(1, 31):
        for index, layer in enumerate(layers):
            gradient = draw.normal(size=layer.shape)
            layer.grad = torch.tensor(gradient)
            w = weights[index]
            if rule == "lars":
                below = np.linalg.norm(gradient) + decay * np.linalg.norm(w)
                ratio = eta * np.linalg.norm(w) / below if np.linalg.norm(w) else 1.0
                first[index] = momentum * first[index] + lr * ratio * (gradient + decay * w)
                weights[index] = w - first[index]
                continue
            first[index] = betas[0] * first[index] + (1 - betas[0]) * gradient
            second[index] = betas[1] * second[index] + (1 - betas[1]) * gradient**2
            mean = first[index] / (1 - betas[0] ** step)
            spread = np.sqrt(second[index] / (1 - betas[1] ** step))
            whole = mean / (spread + eps) + decay * w
            trust = np.linalg.norm(w) / np.linalg.norm(whole) if np.linalg.norm(w) else 1.0
            weights[index] = w - lr * min(trust, 10.0) * whole
        update_with = "lars:eta=0.02" if rule == "lars" else "lamb"
        update(update_with, optimizer)
    for layer, w in zip(layers, weights, strict=True):
        np.testing.assert_allclose(layer.detach().numpy(), w, rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has no Muon before 2.9")
@pytest.mark.parametrize("shape", [(12, 30), (40, 8)])
def test_muon_is_pytorchs(shape: tuple[int, int]) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    weight = torch.randn(shape)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    own = torch.optim.AdamW([ours], **settings)
    other = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(6):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        update("muon", own)
        other.step()
    # PyTorch iterates in bfloat16.
    difference = (ours - theirs).norm() / (theirs - weight).norm()
    assert float(difference) < 0.05


def test_muon_makes_singular_values_equal() -> None:
    matrix = torch.randn(20, 50, dtype=torch.float64)
    for turned in (matrix, matrix.t()):
        values = torch.linalg.svdvals(orthogonalized(turned, 5))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = left.t() @ orthogonalized(matrix, 5) @ right.t()
    torch.testing.assert_close(aligned, aligned.diag().diag(), atol=1e-6, rtol=0)


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw() -> None:
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 6), nn.Conv1d(1, 4, 3), nn.LayerNorm(6), nn.Linear(6, 5)
    )
    other = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    own = torch.optim.AdamW(model.parameters(), **settings)
    adamw = torch.optim.AdamW(other.parameters(), **settings)
    rule = parse("muon").optimizer_rule
    assert rule is not None
    rule = rule.for_model(model)
    for _ in range(3):
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        rule.update(own, own.param_groups[0], own.param_groups[0]["params"])
        adamw.step()
    names = [name for name, _ in model.named_parameters()]
    pairs = zip(names, model.parameters(), other.parameters(), strict=True)
    assert [name for name, left, right in pairs if not torch.allclose(left, right)] == [
        "1.weight",
        "2.weight",
    ]


def test_a_zero_gradient_gives_muon_no_direction() -> None:
    parameter = parameter_with(torch.zeros(3, 4), torch.ones(3, 4))
    update("muon", torch.optim.SGD([parameter], lr=0.1))
    assert torch.equal(parameter.detach(), torch.ones(3, 4))
