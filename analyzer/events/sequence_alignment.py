"""Aligns the calls of several ranks that have no sequence numbers.

Each rank lists its calls in order: what was called (a token: operation and size), when the
call ended, its step. Records agree except for calls that are missing, extra or different on some
rank. Two records are aligned in two ways, and the one that finds more calls is taken:

- by time (`time_alignment`): a collective ends on all its ranks at about the same moment, so
  the difference between the ranks' times is the offset of their clocks, whatever its value;
- by tokens alone, like two versions of a text: where tokens disagree, the alignment resumes at
  the nearest place from which they agree again. Training repeats its calls, so tokens often
  fit at several places; so time is compared first.

Memory is linear in the number of calls. Each disagreement takes time in proportion to the
calls that are skipped there, so the whole takes nearly linear time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ddltrace.analyzer.events.event_columns import IntArray, ranges
from ddltrace.analyzer.events.time_alignment import Calls, match_by_time

_GRAMS: Final = (8, 3, 1)
"""Number of equal consecutive calls after which records agree again; fewer suffice if no longer run
is found."""

_FIRST_REACH: Final = 64
_FIRST_BLOCK: Final = 256
_MAX_MISFIT: Final = 0.2
"""Above this misfit, ends do not coincide: the alignment by time is used only if it finds no fewer
calls than that by tokens."""

_SAME_INPUT: Final = ("all_reduce", "reduce", "reduce_scatter", "send")
_SAME_OUTPUT: Final = ("all_gather", "recv")
_SAME_LARGER: Final = ("broadcast",)
"""Operations whose input, output, or larger of the two has the same size on every rank."""

_FEW: Final = 0.1
"""Sizes of an operation are ignored if a larger share of them is missing on some rank."""

_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)

Pairs = tuple[IntArray, IntArray]
"""Indices of the same calls on the left and on the right, both ascending."""


def common_numbers(ranks: Sequence[Calls]) -> list[IntArray]:
    """Numbers the calls of several ranks so that the same call has the same number on all.

    The first rank's record is extended by the calls that only others have, and each rank's
    record is aligned with the result in turn.

    Returns:
        For each rank the numbers of its calls, ascending; over all ranks they are 0, 1, 2, ...
    """
    known = ranks[0]
    ids = [np.arange(len(known))]
    order = ids[0]
    count = len(known)
    for calls in ranks[1:]:
        left, right = matching(known, calls)
        mine = np.full(len(calls), -1)
        mine[right] = order[left]
        new = np.flatnonzero(mine < 0)
        mine[new] = count + np.arange(len(new))
        count += len(new)
        ids.append(mine)
        if len(new):
            before = np.searchsorted(right, new)  # number of calls of both before each
            place = np.append(left, len(known))[before]
            offsets = np.append(known.time[left] - calls.time[right], 0)
            time = calls.time[new] + offsets[np.maximum(before - 1, 0)]
            known = Calls(
                np.insert(known.token, place, calls.token[new]),
                np.insert(known.time, place, time),
                np.insert(known.step, place, calls.step[new]),
            )
            order = np.insert(order, place, mine[new])
    numbers = np.empty(count, dtype=np.int64)
    numbers[order] = np.arange(count)
    return [numbers[mine] for mine in ids]


def call_tokens(
    ops: Sequence[IntArray],
    sent: Sequence[IntArray],
    received: Sequence[IntArray],
    names: list[str],
) -> list[IntArray]:
    """Tokens of the calls of several ranks: operation, and size where all ranks have the same.

    Args:
        ops: For each rank the operations of its calls, as indices into `names`.
        sent, received: Input and output bytes of each; not positive where they are not known.
        names: Names of operations.

    Returns:
        For each rank the tokens of its calls, from 0 on.
    """
    by_input = np.array([name in (*_SAME_INPUT, *_SAME_LARGER) for name in names])
    by_output = np.array([name in (*_SAME_OUTPUT, *_SAME_LARGER) for name in names])
    sizes = []
    unknown = np.zeros(len(names), dtype=bool)
    for op, given, taken in zip(ops, sent, received, strict=True):
        size = np.maximum(np.where(by_input[op], given, -1), np.where(by_output[op], taken, -1))
        missing = np.bincount(op[size <= 0], minlength=len(names))
        unknown |= missing > _FEW * np.bincount(op, minlength=len(names))
        sizes.append(size)
    op, size = np.concatenate(list(ops)), np.concatenate(sizes)
    size = np.where(unknown[op], -1, size)
    _, sizes_seen = np.unique(size, return_inverse=True)
    sizes_seen = sizes_seen.reshape(-1)
    keys = op.astype(np.int64) * (len(size) + 1) + sizes_seen
    _, tokens = np.unique(keys, return_inverse=True)
    ends = np.cumsum([len(each) for each in ops])
    return np.split(tokens.reshape(-1).astype(np.int64), ends[:-1])


def matching(left: Calls, right: Calls) -> Pairs:
    """Finds the calls that two ranks have in common.

    Args:
        left, right: The calls of each.

    Returns:
        Their indices on the left and on the right, both ascending.
    """
    by_token = _match_by_token(left, right)
    by_time = match_by_time(left, right, by_token)
    if by_time is None or 2 * len(by_time.left) < len(by_token[0]):
        return by_token
    filled = _filled(left, right, (by_time.left, by_time.right))
    coincide = by_time.misfit <= _MAX_MISFIT
    return filled if coincide or len(filled[0]) >= len(by_token[0]) else by_token


def _match_by_token(left: Calls, right: Calls) -> Pairs:
    i, j = _common_step(left, right)
    after = _TokenAligner(left.token[i:], right.token[j:]).pairs()
    if not i or not j:
        return after[0] + i, after[1] + j
    # The records are sure to agree where a step begins: before it they are aligned backwards.
    before = _TokenAligner(left.token[:i][::-1], right.token[:j][::-1]).pairs()
    return (
        np.append(i - 1 - before[0][::-1], after[0] + i),
        np.append(j - 1 - before[1][::-1], after[1] + j),
    )


def _common_step(left: Calls, right: Calls) -> tuple[int, int]:
    """Where the first step that both know begins on each; zeros if there is none."""
    known = [side.step[side.step >= 0] for side in (left, right)]
    if not len(known[0]) or not len(known[1]):
        return 0, 0
    common = max(int(known[0].min()), int(known[1].min()))
    if common > min(int(known[0].max()), int(known[1].max())):
        return 0, 0
    return int(np.argmax(left.step >= common)), int(np.argmax(right.step >= common))


def _filled(left: Calls, right: Calls, pairs: Pairs) -> Pairs:
    """Adds the calls between aligned ones that are as many and the same on both sides.

    A call may end late on some rank, if nothing else disagrees.
    """
    i = np.concatenate([[-1], pairs[0], [len(left)]])
    j = np.concatenate([[-1], pairs[1], [len(right)]])
    between_counts = np.diff(i) - 1
    between = np.flatnonzero((between_counts > 0) & (between_counts == np.diff(j) - 1))
    counts = between_counts[between]
    block, lefts = ranges(i[between] + 1, counts)
    rights = lefts + (j - i)[between][block]
    unlike = left.token[lefts] != right.token[rights]
    good = (np.bincount(block[unlike], minlength=len(between)) == 0)[block]
    return np.sort(np.append(pairs[0], lefts[good])), np.sort(np.append(pairs[1], rights[good]))


class _TokenAligner:
    """Aligns two lists of tokens, from the first on.

    Args:
        left, right: The tokens.
    """

    def __init__(self, left: IntArray, right: IntArray) -> None:
        self._left, self._right = left, right
        self._grams: dict[int, tuple[_Grams, _Grams]] = {}

    def pairs(self) -> Pairs:
        """Indices of the calls that both have."""
        lefts, rights = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        i = j = 0
        while i < len(self._left) and j < len(self._right):
            length = self._equal_from(i, j)
            lefts.append(np.arange(i, i + length))
            rights.append(np.arange(j, j + length))
            i, j = self._resumed(i + length, j + length)
        return np.concatenate(lefts), np.concatenate(rights)

    def _equal_from(self, i: int, j: int) -> int:
        """How many calls are equal from a place on."""
        length, block = 0, _FIRST_BLOCK
        longest = min(len(self._left) - i, len(self._right) - j)
        while length < longest:
            stop = min(length + block, longest)
            unlike = self._left[i + length : i + stop] != self._right[j + length : j + stop]
            if unlike.any():
                return length + int(np.argmax(unlike))
            length, block = stop, 2 * block
        return length

    def _resumed(self, i: int, j: int) -> tuple[int, int]:
        """The nearest place behind a disagreement from which both agree again; else the ends."""
        reach = _FIRST_REACH
        longest = max(len(self._left) - i, len(self._right) - j)
        best = (np.inf, len(self._left), len(self._right))
        if i >= len(self._left) or j >= len(self._right):
            return best[1:]
        while True:
            for gram in _GRAMS:
                lefts, rights = self._candidates(i, j, reach, gram)
                if len(lefts):
                    cost = lefts - i + rights - j + (_GRAMS[0] - gram)
                    at = int(np.argmin(cost))
                    best = min(best, (float(cost[at]), int(lefts[at]), int(rights[at])))
            if reach >= min(longest, best[0]):
                return best[1:]
            reach *= 8

    def _candidates(self, i: int, j: int, reach: int, gram: int) -> Pairs:
        """The nearest places at which enough calls in a row agree."""
        if gram not in self._grams:
            self._grams[gram] = _grams_of(self._left, self._right, gram)
        left, right = self._grams[gram]
        at_left = np.arange(i, min(i + reach, len(left.number)))
        at_right = np.arange(j, min(j + reach, len(right.number)))
        to_right = right.first(left.number[at_left], j)
        to_left = left.first(right.number[at_right], i)
        return (
            np.append(at_left[to_right >= 0], to_left[to_left >= 0]),
            np.append(to_right[to_right >= 0], at_right[to_left >= 0]),
        )


class _Grams:
    """Each place of a record by the calls that follow it.

    Attributes:
        number: For each place the number of the gram that begins there.
    """

    def __init__(self, number: IntArray) -> None:
        self.number = number
        self._width = len(number) + 1
        self._keys = np.sort(number * self._width + np.arange(len(number)))

    def first(self, numbers: IntArray, since: int) -> IntArray:
        """The first place at or behind another that has each gram, or -1."""
        place = np.searchsorted(self._keys, numbers * self._width + since)
        key = self._keys[np.minimum(place, len(self._keys) - 1)]
        hit = (place < len(self._keys)) & (key // self._width == numbers)
        return np.where(hit, key % self._width, -1)


def _grams_of(left: IntArray, right: IntArray, length: int) -> tuple[_Grams, _Grams]:
    """Numbers the runs of a given number of calls in two records; at the ends they are shorter."""
    hashes = []
    for tokens in (left, right):
        padded = np.append(tokens, np.full(length - 1, -1)).astype(np.uint64) + np.uint64(2)
        mixed = padded * _PRIME
        mixed ^= mixed >> np.uint64(29)
        total = np.zeros(len(tokens), dtype=np.uint64)
        for shift in range(length):
            total = total * _PRIME + mixed[shift : shift + len(tokens)]
        hashes.append(total)
    _, numbers = np.unique(np.concatenate(hashes), return_inverse=True)
    numbers = numbers.reshape(-1).astype(np.int64)
    return _Grams(numbers[: len(left)]), _Grams(numbers[len(left) :])
