"""The sample of a long matrix: its size, its order, and that a seed repeats it."""

from __future__ import annotations

import pytest
from support.sampling import ALL_VARIABLE, SEED_VARIABLE, sampled

CASES = [f"case {number}" for number in range(100)]


def test_a_seed_repeats_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_VARIABLE, raising=False)
    samples = []
    for seed in ("1", "2", "1"):
        monkeypatch.setenv(SEED_VARIABLE, seed)
        samples.append(sampled(CASES, 10))
    assert samples[0] == samples[2] != samples[1]
    for sample in samples:
        assert len(set(sample)) == 10
        assert sample == sorted(sample, key=CASES.index)


def test_every_case_is_drawn_by_some_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALL_VARIABLE, raising=False)
    drawn = set()
    for seed in range(200):
        monkeypatch.setenv(SEED_VARIABLE, str(seed))
        drawn |= set(sampled(CASES, 10))
    assert drawn == set(CASES)


def test_all_runs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALL_VARIABLE, "1")
    assert sampled(CASES, 10) == CASES
