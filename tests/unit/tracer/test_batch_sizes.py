"""Samples and tokens of a data loader's batches: `tracer/interpose/batch_sizes.py`."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch

from ddltrace.tracer.interpose.batch_sizes import size_of_batch
from ddltrace.tracer.record.batches import BatchBuilder
from ddltrace.tracer.record.recorder import Recorder

IMAGES = torch.zeros(8, 3, 4, 4)
IDS = torch.zeros(4, 12, dtype=torch.int64)


class Pair(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


class Watched(torch.Tensor):
    """Fails if an operation or an attribute of it is asked for."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("the job's code runs")


class Lazy(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError("the job's code runs")


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IMAGES, 8, -1),
        ([IMAGES, torch.zeros(8, dtype=torch.int64)], 8, -1),
        (Pair(IMAGES, torch.zeros(8)), 8, -1),
        ({"input_ids": IDS, "labels": IDS}, 4, 48),
        # Its name counts, then its place.
        ({"mask": torch.zeros(4, 5, dtype=torch.int64), "input_ids": IDS}, 4, 48),
        (({"input": IDS.int()}, torch.zeros(4, 3, dtype=torch.int64)), 4, 48),
        (UserDict({"tokens": IDS}), 4, 48),
        # Masks, images of bytes and class indices are no tokens.
        ({"mask": IDS.bool(), "image": IDS.to(torch.uint8), "y": IDS[0]}, 4, -1),
        # A scalar has no samples.
        ({"epoch": torch.tensor(3), "x": IMAGES}, 8, -1),
        ({"text": ["a", "b"], "x": None}, -1, -1),
        ("text", -1, -1),
        ([0] * 1000 + [IDS], -1, -1),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), -1, -1),
        (IMAGES.as_subclass(Watched), 8, -1),
        (Lazy(input_ids=IDS), 4, 48),
    ],
)
def test_sizes(batch: Any, samples: int, tokens: int) -> None:
    assert size_of_batch(batch) == (samples, tokens)


def test_a_batch_that_contains_itself_ends() -> None:
    batch: list[Any] = []
    batch += [batch, IDS]
    assert size_of_batch(batch) == (-1, -1)


def test_they_are_columns_of_the_fetch() -> None:
    recorder = Recorder(100)
    for samples, tokens in ((4, 48), (-1, -1)):
        recorder.add(recorder.site("data", "next batch", samples=samples, tokens=tokens), 1, 2, 1)
    recorder.add(recorder.site("host", "aten::mm", flops=1 << 50), 1, 2, 1)
    batch = BatchBuilder(recorder.sites).build(recorder.take())
    assert batch is not None
    assert batch.select(["name", "samples", "tokens", "flops", "bytes"]).to_pylist() == [
        dict(name="next batch", samples=4, tokens=48, flops=None, bytes=None),
        dict(name="next batch", samples=None, tokens=None, flops=None, bytes=None),
        dict(name="aten::mm", samples=None, tokens=None, flops=1 << 50, bytes=None),
    ]
