"""Replaced attributes, taken out and put in again."""

from __future__ import annotations

from types import SimpleNamespace

from ddltrace.tracer.interpose.patches import Patches


class Base:
    def inherited(self) -> str:
        return "base"


class Job(Base):
    def own(self) -> str:
        return "job"


def replacement(_: object) -> str:
    return "tracer"


def idle(_: object) -> str:
    return "idle"


def test_all_attributes_are_put_back_and_in_again() -> None:
    class Traced(Job):
        own = Job.own

    patches = Patches()
    module = SimpleNamespace(function=len)
    patches.put(Traced, "own", replacement)
    patches.put(Traced, "inherited", replacement)
    patches.put(module, "function", replacement, while_off=idle)
    for _ in range(2):
        assert (Traced().own(), Traced().inherited()) == ("tracer", "tracer")
        assert module.function is replacement
        patches.take_out()
        assert (Traced().own(), Traced().inherited()) == ("job", "base")
        assert "inherited" not in vars(Traced)
        assert module.function is idle
        patches.put_in()


def test_a_patch_of_a_job_that_is_not_recorded_waits() -> None:
    patches, module = Patches(), SimpleNamespace(function=len, other=len)
    patches.are_in = False
    patches.put(module, "function", replacement)
    patches.put(module, "other", replacement, while_off=idle)
    assert (module.function, module.other) == (len, idle)
    patches.put_in()
    assert (module.function, module.other) == (replacement, replacement)


def test_what_somebody_else_has_replaced_stays() -> None:
    patches, module = Patches(), SimpleNamespace(function=len)
    patches.put(module, "function", replacement)
    module.function = max  # a library wraps ours
    patches.take_out()
    assert module.function is max
    patches.put_in()
    assert module.function is max
