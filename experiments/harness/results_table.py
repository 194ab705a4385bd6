"""Formats the results of an experiment as text, with explanations.

The table has two parts: the speed of each strategy, and its traffic, resources and losses. A third
part follows if workers have clocks: how far they ran ahead of each other.
`ddltrace.analyzer.formatting.text_table` aligns the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ddltrace.analyzer.compare.mean_difference import LEVEL
from ddltrace.analyzer.formatting.terminal import wrapped
from ddltrace.analyzer.formatting.text_table import aligned
from ddltrace.analyzer.formatting.units import NOT_KNOWN, printable, share_text
from ddltrace.experiments.harness.results import SMOOTHING, Results, Row, label
from ddltrace.experiments.harness.step_intervals import Difference, Speedup
from ddltrace.experiments.strategy.spec import opening_steps_of
from ddltrace.experiments.transports.protocols import Protocol, read_protocol

_SPEED_HEADS = (
    ("", "strategy"),
    ("step", "ms [low, high]"),
    ("against the baseline", "change [low, high]"),
    ("vs", "plain"),
    ("vs tuned", "DDP"),
)
_COST_HEADS = (
    ("", "strategy"),
    ("over-", "lapped"),
    ("exposed", "ms"),
    ("payload", "MB"),
    ("wire", "MB"),
    ("en/de-", "code ms"),
    ("peak", "MB"),
    ("", "loss"),
    ("accu-", "racy"),
    ("s to", "loss"),
)
_CLOCK_HEADS = (
    ("", "strategy"),
    ("staleness", "mean"),
    ("", "max"),
    ("", "distribution"),
    ("blocked", "ms"),
    ("updates", "dropped"),
    ("loss over", "baseline"),
)
_MOST_FREQUENT: Final = 3


def render(results: Results, width: int = 100) -> str:
    """Returns the results as a table, followed by explanations.

    Args:
        results: Those of an experiment.
        width: Columns that a line may take.
    """
    plain, tuned = results.plain(), results.tuned_ddp()
    speed = [
        (
            printable(label(row)),
            _step(row),
            _difference(row, results, found.difference),
            speedup_text(row, plain, found.speedup_plain),
            speedup_text(row, tuned, found.speedup_tuned_ddp),
        )
        for row, found in results.compared()
    ]
    cost = [_costs(row) for row in results.rows]
    lines = [
        *(line for text in setting_lines(results) for line in wrapped(text, width, "  ")),
        "",
        *wrapped(results.headline(), width, "  "),
        "",
        *aligned([*zip(*_SPEED_HEADS, strict=True), *speed], width, keep="start"),
        "",
        *aligned([*zip(*_COST_HEADS, strict=True), *cost], width, keep="start"),
        *_synchronization(results, width),
        "",
        *(line for text in explanations(results) for line in wrapped(text, width, "  ")),
    ]
    return "\n".join(lines[1:] if not lines[0] else lines)


def _synchronization(results: Results, width: int) -> list[str]:
    """A third part of the table, of the rows whose workers have clocks; empty without one."""
    rows = clocked(results)
    if not rows:
        return []
    baseline = results.row(results.baseline)
    table = [(printable(label(row)), *clock_cells(row, baseline)) for row in rows]
    heads = zip(*_CLOCK_HEADS, strict=True)
    return ["", *aligned([*heads, *table], width, keep="start")]


def _network(settings: Mapping[str, Any]) -> str:
    if not settings.get("hosts"):
        return "on this machine's own network"
    text = f"on {settings['hosts']} hosts at {settings.get('bandwidth')}"
    if settings.get("hosts_per_rack"):
        between = settings.get("bandwidth_between") or "the full rate"
        text += f", {settings['hosts_per_rack']} in a rack, {between} between racks"
    for name in ("slow_host", "delay", "loss"):
        if settings.get(name):
            text += f", {name.replace('_', ' ')} {settings[name]}"
    return text


def setting_lines(results: Results) -> list[str]:
    """How the experiment was run, in a few lines; none for bare traces."""
    settings = results.settings
    if not settings:
        return []
    network = _network(settings)
    size = settings.get("gradient_bytes")
    model = f", {size / 1e6:.1f} MB of gradients" if isinstance(size, int) else ""
    command = settings.get("command")
    what = (
        " ".join(map(str, command))
        if isinstance(command, list) and command
        else f"{settings.get('workload')} width {settings.get('width')}{model}"
    )
    ranks = settings.get("ranks")
    lines = [
        f"{what}, {ranks} ranks {network}" if ranks else f"{what}, {network}",
        f"{settings.get('steps')} steps, the first {settings.get('warmup')} not measured; "
        f"{_counted(settings.get('repeats', 1), 'round')}",
    ]
    if settings.get("pace"):
        lines.append(f"paced: layers wait out the times of {settings['pace']}")
    lines += [f"slowed on purpose (--slow): {slow}" for slow in settings.get("slow") or ()]
    if settings.get("protocol"):
        lines += describe(read_protocol(settings["protocol"]), layers=bool(settings.get("pace")))
    return [printable(line) for line in lines]


def describe(protocol: Protocol, *, layers: bool) -> list[str]:
    """A protocol's profile in a few lines.

    Args:
        layers: Whether layers are paced, too.
    """
    if not protocol.is_paced:
        return [f"protocol {protocol.name}: {protocol.summary}; messages are not paced"]
    processor = [
        f"{number.value:.3g} {unit}" if number.value is not None else f"{unit} not modelled"
        for number, unit in (
            (protocol.processor_us_per_message, "us/message"),
            (protocol.processor_ns_per_byte, "ns/byte"),
        )
    ]
    lines = [
        f"paced: messages take the times of the profile {protocol.name} (sources: experiment list)",
        f"{protocol.name}: {protocol.latency_us.value:g} us + bytes at "
        f"{protocol.gbit_s.value:g} Gbit/s; processor {', '.join(processor)}",
    ]
    if protocol.slowdown != 1:
        also = "and layers " if layers else "(not computation) "
        lines.append(
            f"messages {also}take {protocol.slowdown:g} times as long as in their profiles"
        )
    return lines


def explanations(results: Results) -> list[str]:
    """Explanations of the columns, and restrictions on the numbers."""
    over = {row.step_time.over for row in results.rows if row.step_time is not None}
    interval = f"[low, high]: {100 * LEVEL:.0f} % interval "
    if over == {"rounds"}:
        interval += "over the rounds, compared round by round"
    elif over == {"steps"}:
        interval += "over the steps of one run, which names no winner (--repeats)"
    else:
        interval += "over the rounds; of one run each, over its steps, which names no winner"
    lines = [
        "Steady steps only; exposed, payload, wire, encode and decode: per rank and step.",
        "payload: bytes handed to messages; wire: bytes that the sockets sent.",
        f"loss: that of the last {SMOOTHING} steps, as the job computes it."
        if results.settings.get("command")
        else "loss: over all training data at the end; accuracy: on held-out data.",
        f"{interval}.",
        "~ the difference may be noise: its interval contains zero, or it is of one run each.",
    ]
    if any(row.cycle_steps > 1 for row in results.rows):
        lines.append(
            "step of a strategy that exchanges in every n-th step only: the mean over n steps."
        )
    lines += map(printable, _clock_explanations(results))
    lines += [
        f"{printable(label(row))}: {printable(text)}"
        for row in results.rows
        for text in choice_lines(row)
    ]
    tuned = results.tuned_ddp()
    if tuned is not None:
        lines.append(f"tuned DDP: {printable(tuned.strategy)}, the fastest DDP row of this table.")
    target = results.settings.get("target_loss")
    if target is not None:
        lines.append(
            f"s to loss: seconds until the mean training loss of {SMOOTHING} steps is {target:g}."
        )
    if results.status != "complete":
        progress = results.progress
        done = f" ({progress.get('done')} of {progress.get('total')} runs)" if progress else ""
        lines.append(f"The experiment is {printable(results.status)}{done}.")
    for row in results.rows:
        name = printable(label(row))
        if not row.is_sound:
            lines.append(f"{name} {row.status}: {printable(str(row.reason))}")
        if row.replicas_identical is False:
            lines.append(f"{name}: the ranks ended with different parameters.")
        if row.disturbed:
            lines.append(f"{name}: {_disturbance(row)}")
        lines += [f"{name}: {printable(str(note))}" for note in row.notes]
    return lines


def _disturbance(row: Row) -> str:
    runs = [run for run in row.runs if run.round in row.disturbed]
    most = max((run.other_cores or 0.0 for run in runs), default=0.0)
    rounds = ", ".join(map(str, row.disturbed))
    return (
        f"other processes kept up to {most:.2f} cores busy (round {rounds}); do not trust its times"
    )


def choice_lines(row: Row) -> list[str]:
    """What a strategy chose by sizes or measurements, one line each."""
    lines = []
    placement, auto = row.choices.get("placement"), row.choices.get("auto")
    paced, found = row.choices.get("protocol"), row.choices.get("found")
    experts = row.choices.get("experts")
    if placement:
        lines.append(
            f"{_counted(placement['keys'], 'key')} on "
            f"{_counted(len(placement['loads']), 'server')}, skew "
            f"{placement['skew']:.3f} (largest load / mean)."
        )
    if auto:
        chosen = "; ".join(
            f"from {choice['from_bytes'] // 1024} KiB {choice['name']} ({choice['cost_us']:.0f} us)"
            for choice in auto["choices"]
        )
        lines.append(
            f"{_counted(len(auto['racks']), 'rack')}, {_counted(len(auto['hosts']), 'host')} by "
            "the measured links; "
            f"chosen: {chosen}."
        )
    if found:
        parameters = ", ".join(f"{k}={v}" for k, v in found.items() if k != "schedule")
        lines.append(f"found by measurement: {found['schedule']}({parameters}).")
    if experts:
        share = experts["dropped_share"]
        dropped = f"{100 * share:.2f} % of the tokens were" if share else "no token was"
        lines.append(
            f"{dropped} dropped; the rank whose experts had most had {experts['imbalance']:.2f} "
            "times the mean."
        )
    if opening := opening_steps_of(row.strategy.rpartition("/")[2]):
        lines.append(
            f"its first {_counted(opening, 'step')}, in which it searches, calibrates itself or "
            "has not begun, are not measured."
        )
    if row.calibration:
        messages = _counted(round(row.calibration["messages"]), "message")
        lines.append(
            f"calibrated or searched with {messages} of {row.calibration['bytes'] / 1e6:.3f} MB "
            "per rank in all, which are not in payload."
        )
    if paced and paced["messages"]:
        lines.append(
            f"{paced['messages']} paced messages to rank 0 took "
            f"{paced['taken_us'] / paced['planned_us']:.3f} times as long as planned; "
            f"{paced['late']} took over 5 % longer."
        )
    return lines


def _step(row: Row) -> str:
    time = row.step_time
    if time is None:
        return row.status
    text = f"{time.us / 1e3:.2f}"
    if time.low_us is None or time.high_us is None:
        return text
    return f"{text} [{time.low_us / 1e3:.2f}, {time.high_us / 1e3:.2f}]"


def _difference(row: Row, results: Results, difference: Difference | None) -> str:
    if row.strategy == results.baseline:
        return "baseline"
    if difference is None:
        return NOT_KNOWN
    low, high = 100 * difference.low, 100 * difference.high
    text = f"{100 * difference.relative:+.1f} % [{low:+.1f}, {high:+.1f}]"
    return text if difference.is_clear else f"{text} ~"


def speedup_text(row: Row, reference: Row | None, found: Speedup | None) -> str:
    """A speed-up as the tables show it.

    Args:
        reference: The row that it is measured against.
        found: The speed-up; None if it is not known.
    """
    if row is reference:
        return "1"
    if found is None:
        return NOT_KNOWN
    return f"{found.ratio:.2f}x" + (" ~" if found.verdict == "noise" else "")


def _costs(row: Row) -> Sequence[str]:
    codec = None
    if row.encode_us is not None or row.decode_us is not None:
        codec = (row.encode_us or 0) + (row.decode_us or 0)
    return (
        printable(label(row)),
        share_text(row.overlap_ratio),
        number_text(row.exposed_us, 1e-3, 2),
        number_text(row.payload_bytes, 1e-6, 3),
        number_text(row.wire_bytes, 1e-6, 3),
        number_text(codec, 1e-3, 2),
        number_text(row.peak_memory_bytes, 1e-6, 0),
        number_text(row.train_loss, 1, 4),
        share_text(row.test_accuracy),
        number_text(row.time_to_loss_us, 1e-6, 2),
    )


def number_text(value: float | None, scale: float, digits: int) -> str:
    """A scaled number with some digits after the point; a sign for None."""
    return NOT_KNOWN if value is None else f"{value * scale:.{digits}f}"


def _counted(count: object, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def clocked(results: Results) -> list[Row]:
    """The rows whose traces have clocks of their workers."""
    return [row for row in results.rows if row.synchronization is not None]


def clock_cells(row: Row, baseline: Row | None) -> list[str]:
    """One row, columns as in `_CLOCK_HEADS`, without the strategy's name.

    Args:
        row: A row of `clocked`.
        baseline: The row to whose loss it is compared.
    """
    found = row.synchronization or {}
    staleness, updates = found["staleness"], found["updates"]
    blocked = found["blocked_us"]
    return [
        NOT_KNOWN if staleness is None else f"{staleness['mean']:.2f}",
        NOT_KNOWN if staleness is None else str(staleness["max"]),
        NOT_KNOWN if staleness is None else distribution_text(staleness),
        NOT_KNOWN if blocked is None else f"{blocked / 1e3:.2f}",
        NOT_KNOWN if not updates else f"{updates['dropped']} of {updates['pushed']}",
        _loss(row, baseline),
    ]


def distribution_text(staleness: dict[str, Any]) -> str:
    """The most frequent values of a distribution with their shares, and how many there are more."""
    counts = {int(age): count for age, count in staleness["counts"].items()}
    total = sum(counts.values())
    often = sorted(sorted(counts, key=lambda age: -counts[age])[:_MOST_FREQUENT])
    text = ", ".join(f"{age}: {share_text(counts[age] / total)}" for age in often)
    return text if len(counts) <= _MOST_FREQUENT else f"{text}, ..."


def _clock_explanations(results: Results) -> list[str]:
    """How to read the columns; nothing if no row has them."""
    rows = clocked(results)
    if not rows:
        return []
    lines = [
        "staleness: how many steps the oldest missing update is behind the step that a read "
        "begins; between peers, how many steps two ranks that average are apart.",
        "blocked: for how long a read was held back, per step; between peers, how long a rank "
        "waited for others.",
    ]
    for row in rows:
        bounds = (row.synchronization or {})["bounds"]
        if bounds and bounds["min"] != bounds["max"]:
            lines.append(
                f"{row.strategy}: reads were admitted by bounds {bounds['min']} to "
                f"{bounds['max']}, {bounds['last']} at the end."
            )
    return lines


def _loss(row: Row, baseline: Row | None) -> str:
    if baseline is None or row is baseline:
        return "baseline" if baseline is not None else NOT_KNOWN
    if row.train_loss is None or baseline.train_loss is None:
        return NOT_KNOWN
    return f"{row.train_loss - baseline.train_loss:+.4f}"
