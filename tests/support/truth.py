"""Our times beside those of torch.profiler, for the same things in the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddltrace.tracer.trace.event_reader import read_events
from ddltrace.tracer.trace.run_reader import read_run


@dataclass(frozen=True)
class Difference:
    """Ours minus the profiler's, in microseconds, one entry for each thing compared.

    Attributes:
        what: What was compared.
        start_us: Error of the starts.
        end_us: Error of the ends.
        waited: Whether the end is the moment at which the backward pass had waited for it. By then
            it was over; Gloo's thread, from which the profiler knows, may say so only later.
    """

    what: str
    start_us: npt.NDArray[np.float64]
    end_us: npt.NDArray[np.float64]
    waited: npt.NDArray[np.bool_]


def differences(trace: Path, kineto: Path) -> list[Difference]:
    """Compares all-reduces and convolutions of all ranks.

    Args:
        trace: A trace of `tests/jobs/profiled.py`.
        kineto: The folder into which that job exported what its profiler saw.

    Returns:
        One entry for each kind of thing.

    Raises:
        ValueError: The two did not see the same number of things.
    """
    run = read_run(trace)
    found: dict[str, list[npt.NDArray[np.float64]]] = {"all_reduce": [], "conv2d": []}
    for info in run.ranks:
        data = json.loads((kineto / f"kineto-{info.rank}.json").read_text())
        # Kineto is on the wall clock, we are on the monotonic one.
        shift = data["baseTimeNanoseconds"] - info.clock["unix_ns"] + info.clock["monotonic_ns"]
        frame = read_events(trace, info.segment)[0].to_pandas()
        waited_ns = frame.end_ns[(frame.kind == "phase") & (frame.name == "backward")]
        messages = frame[(frame.kind == "message") & (frame.op == "all_reduce")]
        ours = {
            "all_reduce": messages.drop_duplicates("id", keep="last"),
            "conv2d": frame[(frame.kind == "layer") & frame.name.isin(["0", "2"])],
        }
        for what, name in (("all_reduce", "gloo:all_reduce"), ("conv2d", "aten::conv2d")):
            theirs = np.array(
                sorted(
                    (event["ts"] * 1e3 + shift, (event["ts"] + event["dur"]) * 1e3 + shift)
                    for event in data["traceEvents"]
                    if event.get("ph") == "X" and event["name"] == name
                )
            )
            rows = ours[what].sort_values("start_ns")[["start_ns", "end_ns"]].to_numpy(np.float64)
            # The profiler saw a window of steps. Ours begin before theirs: from the last row
            # that began before its first on (but for what two readings of clocks may differ).
            first = int(np.searchsorted(rows[:, 0], theirs[0, 0] + 20e3, side="right")) - 1
            rows = rows[first : first + len(theirs)]
            if len(rows) != len(theirs):
                raise ValueError(f"{what}: {len(rows)} of ours, {len(theirs)} of the profiler's")
            waited = np.isin(rows[:, 1], waited_ns.to_numpy(np.float64))
            found[what].append(np.column_stack([(rows - theirs) / 1e3, waited]))
    merged = {what: np.concatenate(parts) for what, parts in found.items()}
    return [
        Difference(what, columns[:, 0], columns[:, 1], columns[:, 2] > 0)
        for what, columns in merged.items()
    ]
