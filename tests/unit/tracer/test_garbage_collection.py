"""Python's garbage collections as markers: `tracer/interpose/garbage_collection.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ddltrace.tracer.interpose.garbage_collection import install
from ddltrace.tracer.record.recorder import FLAT_CELLS, Recorder


@dataclass
class Rank:
    """What the patch uses of a recording rank."""

    recorder: Recorder = field(default_factory=lambda: Recorder(1000, detailed=True))
    record: Any = field(default_factory=lambda: SimpleNamespace(info=SimpleNamespace()))
    on_switch: list[Callable[[bool], None]] = field(default_factory=list)
    closing: list[Callable[[float], object]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, where: str, error: Exception) -> None:
        self.faults.append(f"{where}: {error}")

    def on_close(self, call: Callable[[float], object]) -> None:
        self.closing.append(call)

    def durations(self) -> list[int]:
        rows = self.recorder.flat
        return [
            end - start for start, end in zip(rows[1::FLAT_CELLS], rows[2::FLAT_CELLS], strict=True)
        ]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made, before = Rank(), gc.callbacks[:]
    install(made)  # type: ignore[arg-type]
    yield made
    for close in made.closing:
        close(1.0)
    assert gc.callbacks == before


@pytest.fixture
def many_objects() -> list[Any]:
    """So many that a collection of all takes more than a millisecond."""
    gc.collect()
    return [[number] for number in range(500_000)]


def test_long_collections_are_recorded(rank: Rank, many_objects: list[Any]) -> None:
    gc.collect()
    found = rank.durations()
    assert found
    assert min(found) >= 1_000_000
    assert rank.recorder.sites[rank.recorder.flat[0]][1] == "garbage collection"
    assert rank.record.info.collections is True


def test_a_fault_is_noted_and_not_printed(
    rank: Rank,
    many_objects: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def add(*_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(rank.recorder, "add", add)
    gc.collect()
    assert rank.faults == ["collect: broken"]
    assert capfd.readouterr().err == ""


def test_short_collections_are_not(rank: Rank) -> None:
    gc.freeze()
    try:
        for _ in range(100):
            gc.collect()
        assert len(rank.durations()) < 10  # a machine may stop the process now and then
    finally:
        gc.unfreeze()


def test_nothing_is_called_while_recording_is_off(rank: Rank, many_objects: list[Any]) -> None:
    callbacks = len(gc.callbacks)
    for switch in rank.on_switch:
        switch(False)
    assert len(gc.callbacks) == callbacks - 1
    before = len(rank.durations())
    gc.collect()
    assert len(rank.durations()) == before
    for switch in rank.on_switch:
        switch(True)
    gc.collect()
    assert len(rank.durations()) > before
