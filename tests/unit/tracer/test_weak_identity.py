"""What is known of an object goes with it."""

from __future__ import annotations

import gc

import torch

from ddltrace.tracer.naming.weak_identity import WeakIdentityMap


def test_tensors_are_known_by_identity_and_forgotten_with_their_end() -> None:
    known: WeakIdentityMap[torch.Tensor, int] = WeakIdentityMap()
    first, second = torch.ones(3), torch.ones(3)  # equal, but not the same
    known.set(first, 0)
    assert (known.get(first), known.get(second)) == (0, None)
    known.set(second, 2)
    known.set(first, 1)
    assert [known.get(key) for key in known.live_keys()] == [1, 2]
    assert (known.pop(second), known.pop(second)) == (2, None)
    del first
    gc.collect()
    assert known.live_keys() == []


def test_another_object_in_the_place_of_one_that_is_gone_is_not_known() -> None:
    known: WeakIdentityMap[torch.Tensor, int] = WeakIdentityMap()
    places = set()
    for number in range(2000):
        tensor = torch.ones(1)
        assert known.get(tensor) is None
        places.add(id(tensor))
        known.set(tensor, number)
    assert len(places) < 2000, "no place was given twice: nothing was tested"
    del tensor
    assert known.live_keys() == []
