"""Records without numbers, made from a known job: the same calls are found on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from ddltrace.analyzer.events.sequence_alignment import call_tokens, common_numbers
from ddltrace.analyzer.events.time_alignment import Calls
from ddltrace.analyzer.joined.join import State, join
from ddltrace.analyzer.joined.trace_scans import scan_ranks
from ddltrace.analyzer.open_trace import Trace, open_trace

JITTER_NS = 20_000


class Job:
    """A job's calls in true order, and what each of its ranks recorded of them."""

    def __init__(self, seed: int, *, alphabet: int, uniform: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        count, period = self.random.integers(150, 400), int(self.random.integers(2, 15))
        self.token = np.resize(self.random.integers(0, alphabet, period), count)
        gaps = self.random.integers(100_000, 2_000_000, count)
        gaps[::period] += 20_000_000
        self.time = np.cumsum(np.full(count, 1_000_000) if uniform else gaps)
        self.step = np.arange(count) // period

    def record(self, *, lost: list[tuple[int, int]], wrong: int = 0, extra: int = 0):
        """A rank's record with a clock of its own, and which true call each of its calls is."""
        count = len(self.time)
        token, truth, kept = self.token.copy(), np.arange(count), np.ones(count, dtype=bool)
        changed = self.random.integers(0, count, wrong)
        token[changed], truth[changed] = 99, -1
        for first, length in lost:
            kept[first : first + length] = False
        jitter = self.random.normal(0, JITTER_NS, count)
        drift, offset = self.random.normal(0, 3e-5), self.random.normal(0, 1e9)
        time = (self.time * (1 + drift) + jitter + offset).astype(np.int64)
        columns = [each[kept] for each in (token, time, self.step, truth)]
        for _ in range(extra):
            at = int(self.random.integers(1, len(columns[0])))
            between = (columns[1][at - 1] + columns[1][at]) // 2
            values = (self.random.choice(self.token), between, columns[2][at], -1)
            columns = [
                np.insert(each, at, value) for each, value in zip(columns, values, strict=True)
            ]
        return Calls(columns[0], columns[1], np.full(len(columns[2]), -1)), columns[3]

    def losses(self, count: int, longest: int) -> list[tuple[int, int]]:
        """Random stretches of calls."""
        places = self.random.integers(0, len(self.time), count)
        return [(int(at), int(self.random.integers(1, longest + 1))) for at in places]


def check(records, *, share: float) -> None:
    """The share of common calls that get the same number; other pairs hardly ever do."""
    numbers = common_numbers([calls for calls, _ in records])
    for right in range(1, len(records)):
        for left in range(right):
            same, mine, its = np.intersect1d(numbers[left], numbers[right], return_indices=True)
            truths = records[left][1][mine], records[right][1][its]
            good = int(((truths[0] == truths[1]) & (truths[0] >= 0)).sum())
            common = np.intersect1d(records[left][1], records[right][1])
            assert good >= share * (common >= 0).sum()
            assert len(same) - good <= (1 - share) * len(same)


@pytest.mark.parametrize("alphabet", [1, 6])
@pytest.mark.parametrize("kind", ["missing", "blocks", "wrong", "extra", "all"])
def test_calls_are_found_again(kind, alphabet):
    for seed in range(4):
        job = Job(seed, alphabet=alphabet)
        records = [
            job.record(
                lost=job.losses({"missing": 2, "all": 2}.get(kind, 0), 1)
                + job.losses({"blocks": 1, "all": 1}.get(kind, 0), 40),
                wrong=2 if kind in ("wrong", "all") else 0,
                extra=2 if kind in ("extra", "all") else 0,
            )
            for _ in range(3)
        ]
        check(records, share=0.9 if kind == "all" else 0.97)


@pytest.mark.parametrize("alphabet", [1, 6])
def test_of_evenly_spaced_equal_calls_one_is_missing(alphabet):
    for seed in range(6):
        job = Job(seed, alphabet=alphabet, uniform=True)
        lost = [(int(job.random.integers(1, len(job.time) - 1)), 1)]
        check([job.record(lost=[]), job.record(lost=lost)], share=0.99)


@pytest.mark.parametrize("alphabet", [1, 6])
def test_a_record_that_begins_later(alphabet):
    for seed in range(4):
        job = Job(seed, alphabet=alphabet)
        check([job.record(lost=[]), job.record(lost=[(0, 37)])], share=0.99)


def test_without_times_tokens_are_enough():
    tokens = np.arange(600) % 14
    kept = np.delete(np.arange(600), [100, 333, 334])
    records = [
        Calls(each, np.zeros(len(each), np.int64), np.full(len(each), -1))
        for each in (tokens, tokens[kept])
    ]
    first, second = common_numbers(records)
    assert first.tolist() == list(range(600))
    assert second.tolist() == kept.tolist()


def test_work_is_nearly_linear_where_nothing_agrees():
    random = np.random.default_rng(0)
    records = [
        Calls(random.integers(0, 3, 20_000), np.zeros(20_000, np.int64), np.full(20_000, -1))
        for _ in range(2)
    ]
    first, second = common_numbers(records)
    assert (np.diff(first) > 0).all()
    assert (np.diff(second) > 0).all()


def test_sizes_count_only_where_all_ranks_have_the_same():
    names = ["all_reduce", "all_to_all", "all_gather"]
    op = np.array([0, 1, 2])
    first, second = call_tokens(
        [op, op],
        [np.array([4, 4, 4]), np.array([4, 9, 9])],
        [np.array([4, 4, 64]), np.array([4, 9, 64])],
        names,
    )
    assert first.tolist() == second.tolist()
    changed, _ = call_tokens([op, op], [np.array([8, 4, 4]), op + 4], [op + 9, op + 9], names)
    assert changed[0] != first[0] or len(set(changed.tolist())) == 3


@pytest.mark.parametrize("sizes", ["equal", "varied"])
@pytest.mark.parametrize("missing", [0, 1, 37, 80, 159])
def test_one_missing_of_160_leaves_all_others_joined(build, missing, sizes):
    built = build(2)
    for rank in range(2):
        for number in range(160):
            if rank and number == missing:
                continue
            start = 1000 * number + 100 * rank * (number % 2)
            size = 4096 if sizes == "equal" else 1024 * (1 + number % 5)
            built[rank].message("all_reduce", start, 1000 * number + 500, bytes=size)
    joined = _joined(built.trace())
    states = joined.collectives.state.tolist()
    assert states.count(State.PARTIAL) == 1
    assert states.count(State.COMPLETE) == 159
    assert states.index(State.PARTIAL) == missing
    wait, _ = joined.wait_and_transfer()
    assert wait[joined.rows(0)].max() == 100_000, "the true wait, not one of another collective"


def _joined(trace: Trace):
    return join(trace, {rank: scan.messages for rank, scan in scan_ranks(trace).items()})


def test_a_wrong_size_is_left_out(build, tmp_path):
    built = build(2)
    for rank in range(2):
        for number in range(20):
            size = 999 if (rank, number) == (1, 7) else 4096
            built[rank].message("all_reduce", 1000 * number, 1000 * number + 500, bytes=size)
    states = _joined(open_trace(built.write())).collectives.state.tolist()
    assert (states.count(State.COMPLETE), states.count(State.PARTIAL)) == (19, 2)
