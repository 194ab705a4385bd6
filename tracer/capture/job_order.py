"""Carries out an order to switch recording on all ranks at the same step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from ddltrace.tracer.capture.step_marks import match_steps
from ddltrace.tracer.config import LEVELS

_MOST_AT_ONCE: Final = 32
_LEAD_NS: Final = 300_000_000
"""Time until the change, at least: longer than the order takes to all ranks."""
_LEAD_TO_RENAME_NS: Final = 2_000_000_000
"""The same if a rank that is late could never follow."""
_TIMES_AS_LONG: Final = 5
"""The lead is so many times as long as the question for the ranks' states took, on busy hosts."""

ACTIONS: Final = ("on", "off", "level")


@dataclass(frozen=True)
class Order:
    """An order for the ranks of a job.

    Attributes:
        action: One of `ACTIONS`.
        steps: ``on``: number of steps to record; None for all further ones.
        level: Level of detail; None for that with which the job was started.
        ranks: The ranks that it is for; None for all.
        reason: Why a trigger gives it; empty if a user does.
    """

    action: str
    steps: int | None = None
    level: str | None = None
    ranks: tuple[int, ...] | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Order:
        """Reads an order.

        Raises:
            ValueError: It is none.
        """
        action, steps, level = value.get("action"), value.get("steps"), value.get("level")
        ranks = value.get("ranks")
        if action not in ACTIONS or not (level is None or level in LEVELS):
            raise ValueError("not an order")
        if not (steps is None or (type(steps) is int and steps > 0)):
            raise ValueError("not a number of steps")
        if ranks is not None:
            ranks = tuple(int(rank) for rank in ranks)
        return Order(str(action), steps, level, ranks, str(value.get("reason") or "")[:200])


@dataclass(frozen=True)
class Member:
    """A process of the job that can be asked.

    Attributes:
        rank: Its rank.
        ask: Sends it a request and returns its answer; raises OSError.
    """

    rank: int
    ask: Callable[[dict[str, Any]], dict[str, Any]]


def carry_out(order: Order, members: Sequence[Member]) -> dict[str, Any]:
    """Lets all members change what they record with the same step.

    Args:
        members: The ranks that can be reached.

    Returns:
        `step`: the first step of the change; None if no rank changes. `ranks`: the ranks that
        change. `missing`: those that cannot, and `reasons`: why not, by rank.
    """
    reasons: dict[int, str] = {}
    asked_ns = time.monotonic_ns()
    states = ask_all(members, {"do": "state"}, reasons)
    lead_ns = _TIMES_AS_LONG * (time.monotonic_ns() - asked_ns)
    world = max((state["world_size"] for state in states.values()), default=0)
    wanted = set(range(world)) if order.ranks is None else set(order.ranks)
    for rank in sorted(wanted - set(states)):
        reasons.setdefault(rank, "no socket of it was found from here")
    shifts = _shifts(states, reasons)
    changed: list[int] = []
    step = None
    if wanted & set(shifts):
        renames = order.action != "level" and any(states[r]["marks"] is not None for r in shifts)
        lead_ns = max(lead_ns, _LEAD_TO_RENAME_NS if renames else _LEAD_NS)
        step = _common_step(states, shifts, lead_ns)
        # All ranks have to call the step the same, not only those that change.
        asked = set(shifts) if renames else wanted & set(shifts)
        requests = {
            rank: _request(order, step, states[rank], shifts[rank], is_for=rank in wanted)
            | ({"called": step} if renames else {})
            for rank in asked
        }
        late: dict[int, str] = {}
        answers = ask_all([member for member in members if member.rank in asked], requests, late)
        for rank, answer in answers.items():
            if answer["in_time"]:
                changed.append(rank)
            else:
                then = "its steps cannot be matched any more" if renames else "it follows later"
                late[rank] = f"the order came after step {step} had begun: {then}"
        reasons |= late
    changed = [rank for rank in changed if rank in wanted]
    missing = sorted(rank for rank in reasons if rank in wanted and rank not in changed)
    return {
        "step": step if changed else None,
        "ranks": sorted(changed),
        "missing": missing,
        "reasons": {str(rank): reasons[rank] for rank in missing},
    }


def _shifts(states: Mapping[int, Mapping[str, Any]], reasons: dict[int, str]) -> Mapping[int, int]:
    """What to add to each rank's number of a step, for those that can follow.

    Args:
        states: The ranks' states.
        reasons: Receives why the others cannot.
    """
    marks = {rank: state["marks"] for rank, state in states.items() if state["marks"] is not None}
    if len(marks) < len(states):
        later = "it was attached after the job's steps had been numbered"
        reasons |= dict.fromkeys(marks, later)
        return dict.fromkeys(states.keys() - marks.keys(), 0)
    if not marks:
        return {}
    shifts = match_steps(marks)
    unmatched = sorted(marks.keys() - shifts.keys())
    if not unmatched:
        return shifts
    # The steps of a rank that is left out now could not be matched later.
    waiting = (
        f"the steps of rank {unmatched[0]} cannot be matched with those of rank {min(marks)}, as "
        "none of them, or too few, ended on both since both were attached: try again"
    )
    reasons |= dict.fromkeys(marks, waiting)
    return {}


def _request(
    order: Order, step: int, state: Mapping[str, Any], shift: int, *, is_for: bool
) -> dict[str, Any]:
    level = order.level or state["default_level"]
    own = step - shift
    changes = [[own, level if is_for and order.action != "off" else None]]
    if is_for and order.action == "on" and order.steps is not None:
        changes.append([own + order.steps, None])
    return {
        "do": "plan",
        "changes": changes,
        "level_only": order.action == "level",
        "reason": order.reason,
    }


def _common_step(
    states: Mapping[int, Mapping[str, Any]], shifts: Mapping[int, int], lead_ns: int
) -> int:
    """A step that no rank will have begun when the order reaches it.

    It comes after the step of the order before: a lead in time is fewer steps when steps got
    slower meanwhile, and an order must not overtake another.
    """
    durations = [states[rank]["step_ns"] for rank in shifts if states[rank]["step_ns"]]
    steps = math.ceil(lead_ns / min(durations)) if durations else 1
    return max(
        shift + max(int(states[rank]["following"]) + steps, int(states[rank]["planned"]) + 1)
        for rank, shift in shifts.items()
    )


def ask_all(
    members: Sequence[Member], request: Mapping[Any, Any], reasons: dict[int, str]
) -> dict[int, dict[str, Any]]:
    """Asks all members at once.

    Args:
        request: The request, or one for each rank.
        reasons: Receives why a rank did not answer.

    Returns:
        The answers, by rank.
    """
    answers: dict[int, dict[str, Any]] = {}

    def one(member: Member) -> None:
        own = request if "do" in request else request[member.rank]
        try:
            answer = member.ask(dict(own))
            if "error" in answer:
                reasons[member.rank] = str(answer["error"])[:200]
            else:
                answers[member.rank] = answer
        except OSError as error:
            reasons[member.rank] = f"it does not answer: {error}"

    if members:
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(members))) as pool:
            list(pool.map(one, members))
    return answers
