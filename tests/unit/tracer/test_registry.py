"""The registry of parameters and the counters of messages: right, and never without end."""

from __future__ import annotations

import copy
import threading

import torch
from torch import nn

from ddltrace.tracer.interpose.c10d import groups
from ddltrace.tracer.interpose.c10d.groups import Group
from ddltrace.tracer.naming.registry import Registry
from ddltrace.tracer.record.recorder import Recorder


def names(registry: Registry) -> list[str]:
    return [tensor.name for tensor in registry.tensors]


def test_models_that_live_at_once_have_names_of_their_own() -> None:
    registry = Registry(Recorder(100))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [t for t, _ in registry.add_model(first)] == [0, 1]
    assert [t for t, _ in registry.add_model(second)] == [2, 3]
    assert names(registry) == ["weight", "bias", "weight#2", "bias#2"]
    assert registry.add_model(first) == []


def test_a_copy_takes_the_place_of_one_that_is_gone() -> None:
    registry = Registry(Recorder(100))
    model = nn.Linear(2, 2)
    registry.add_model(model)
    registry.trained.update((0, 1))
    for _ in range(50):
        copied = copy.deepcopy(model)
        assert [t for t, _ in registry.add_model(copied)] == [2, 3]
        assert not registry.model_is_trained(copied)
        registry.trained.update((2, 3))
        assert registry.tensor_id(copied.weight) == 2
        assert registry.tensors_at([copied.bias]) == [3]
        del copied
    assert len(registry.tensors) == 4
    assert registry.tensor_id(model.weight) == 0
    assert registry.model_is_trained(model)


def test_who_does_not_train_finds_parameters_but_no_gradients() -> None:
    registry, model = Registry(Recorder(100)), nn.Linear(2, 2)
    registry.add_model(model)
    registry.access.note_pass()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    wanted = [[model.bias], [model.weight.grad]]
    found: list[list[int] | None] = []
    beside = threading.Thread(target=lambda: found.extend(map(registry.tensors_at, wanted)))
    beside.start()
    beside.join(30)
    assert found == [[1], None]
    assert list(map(registry.tensors_at, wanted)) == [[1], [0]]


def test_another_shape_takes_no_place_over() -> None:
    registry = Registry(Recorder(100))
    for width in (2, 3):
        registry.add_parameters([("w", nn.Parameter(torch.zeros(width)))])
    assert [(t.name, t.shape) for t in registry.tensors] == [("w", (2,)), ("w#2", (3,))]


def test_parameters_without_end_are_counted_not_kept(monkeypatch) -> None:
    monkeypatch.setattr("ddltrace.tracer.naming.registry._MAX_TENSORS", 3)
    registry = Registry(Recorder(100))
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    assert len(registry.add_model(model)) == 3
    assert registry.unnamed == 3
    assert registry.tensor_id(model[2].weight) is None


def numbers(group: Group, op: str, tags: list[int]) -> list[int | None]:
    given = []
    for tag in tags:
        given.append(group.next_between(op, 1 - (group.own or 0), tag))
    return given


def test_both_sides_number_their_messages_alike_under_more_tags_than_are_kept() -> None:
    sender, receiver = Group("g", (0, 1), 0), Group("g", (0, 1), 1)
    tags = [tag for tag in range(3 * groups._MAX_TAGS) for _ in range(1 + tag % 2)]
    tags += tags[:100]
    sent, received = numbers(sender, "send", tags), numbers(receiver, "recv", tags)
    assert sent == received
    assert len(set(zip(tags, sent, strict=True))) == len(tags)
    assert all(len(by_tag) <= groups._MAX_TAGS + 2 for by_tag in sender.messages.values())
    # The other direction has numbers of its own.
    assert numbers(receiver, "send", [5, 5]) == [0, 1]
