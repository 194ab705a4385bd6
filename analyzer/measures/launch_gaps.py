"""Launches of device work, and how long devices idle because the host has not launched the next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ddltrace.analyzer.measures.breakdown import ratio
from ddltrace.analyzer.measures.device_queues import DEVICE_QUEUES
from ddltrace.analyzer.measures.measure import Whole, derived
from ddltrace.analyzer.measures.operation_rows import KERNELS

_SYNCHRONIZES: Final = re.compile(r"(?:cuda|cu|hip|musa)\w*(?:Stream|Device|Ctx)Synchronize$")
_TO_HOST: Final = "Memcpy DtoH"


@dataclass(frozen=True)
class LaunchGaps:
    """Launches of device work in the steady steps, and the gaps that they leave on the device.

    A launch gap is a time of at most 1 ms in which the device idles for the host's code, which
    prepares the next launch. Values are means over ranks and steps.

    Attributes:
        launches: Kernels, copies and messages launched in a step of one rank.
        launches_per_s: The same per second.
        gap_us: Launch gaps in a step of one rank.
        gap_share: Their share of the time.
        gap_share_of_host: Their share of the time in which a device idles for the host's code
            (`IdleRow.host_us`); null if there is none.
        in_phase_share_of_host: The share of the same time, in gaps of any length, that is inside of
            recorded forward and backward passes and optimizer steps.
        synchronizations: In a step of one rank, calls that wait for the device, such as
            cudaStreamSynchronize, or copies from the device to the host, whichever are more.
    """

    launches: float
    launches_per_s: float
    gap_us: float
    gap_share: float
    gap_share_of_host: float | None
    in_phase_share_of_host: float | None
    synchronizations: float


def _launch_gaps(whole: Whole) -> LaunchGaps | None:
    """Measures launches in steady steps; None without recorded launches in these steps."""
    rank_steps, counted = whole.rank_steps, whole.window
    operators = whole.found.of(KERNELS).operators
    copies = whole.found.of(DEVICE_QUEUES).copies
    launches = float(rank_steps["launches"][counted].sum())
    if not launches:
        return None

    def total(name: str) -> float:
        return float(rank_steps[name][counted].sum())

    number = int(counted.sum())
    wall, host, gap = total("wall_ns"), total("idle_host_ns"), total("launch_gap_ns")
    calls = sum(row.count for row in operators if _SYNCHRONIZES.match(row.name))
    to_host = sum(row.count for row in copies if row.direction == _TO_HOST)
    return LaunchGaps(
        launches=launches / number,
        launches_per_s=launches / wall * 1e9,
        gap_us=gap / number / 1e3,
        gap_share=gap / wall,
        gap_share_of_host=ratio(gap, host),
        in_phase_share_of_host=ratio(total("idle_in_phase_ns"), host),
        synchronizations=max(calls, to_host) / len(rank_steps["step"]),
    )


LAUNCH_GAPS: Final = derived("launch_gaps", _launch_gaps)
