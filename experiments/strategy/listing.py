"""The catalogue as ``ddltrace experiment list`` shows it."""

from __future__ import annotations

from typing import Any

from ddltrace.experiments.grammar import parameters_of
from ddltrace.experiments.strategy.catalogue import techniques
from ddltrace.experiments.strategy.presets import PRESETS
from ddltrace.experiments.technique import AXES, Technique
from ddltrace.experiments.transports.protocols import PROTOCOLS, Protocol


def as_json() -> dict[str, Any]:
    """All techniques by axis, and all presets, as ``--json`` prints them."""
    return {
        "schema": "ddltrace.techniques/1",
        "techniques": [_row(entry) for entry in techniques()],
        "presets": [
            {
                "name": entry.name,
                "expands_to": entry.expands_to,
                "summary": entry.summary,
                "source": entry.source,
            }
            for entry in PRESETS
        ],
        "protocols": [protocol.to_json() for protocol in PROTOCOLS],
    }


def as_text() -> str:
    """The same for people: one group of lines for each axis."""
    listing = as_json()
    lines = []
    for axis in AXES:
        lines.append(axis)
        for row in listing["techniques"]:
            if row["axis"] == axis:
                lines += _lines(row)
    if listing["presets"]:
        lines.append("presets")
    for row in listing["presets"]:
        lines.append(f"  * {row['name']:<16} {row['expands_to']}")
        lines.append(f"      {row['summary']} ({row['source']})")
    lines.append("protocols (--protocol)")
    for protocol in PROTOCOLS:
        lines += _protocol_lines(protocol)
    lines.append("")
    lines.append("* can be named: ddltrace experiment run --strategy NAME[:KEY=VALUE,...]")
    lines.append("techniques of different axes are joined by +; + marks a modifier of its axis")
    return "\n".join(lines)


def _protocol_lines(protocol: Protocol) -> list[str]:
    lines = [f"  * {protocol.name:<16} {protocol.summary}"]
    numbers = (
        ("latency", protocol.latency_us, "us"),
        ("bandwidth", protocol.gbit_s, "Gbit/s"),
        ("processor per message", protocol.processor_us_per_message, "us"),
        ("processor per byte", protocol.processor_ns_per_byte, "ns"),
    )
    for name, number, unit in numbers if protocol.is_paced else ():
        value = "none" if number.value is None else f"{number.value:.4g} {unit}"
        lines.append(f"      {name}: {value} ({number.source})")
    return lines


def _row(entry: Technique) -> dict[str, Any]:
    parameters = parameters_of(entry.build) if entry.build else {}
    return {
        "axis": entry.axis,
        "name": entry.name,
        "parameters": {
            name: {"type": parameter.kind, "default": parameter.default}
            for name, parameter in parameters.items()
        },
        "selectable": entry.build is not None,
        "summary": entry.summary,
        "source": entry.source or None,
        "needs": list(entry.needs),
        "modifier": entry.modifier,
    }


def _lines(row: dict[str, Any]) -> list[str]:
    mark = "+" if row["modifier"] else "*" if row["selectable"] else " "
    source = f" ({row['source']})" if row["source"] else ""
    lines = [f"  {mark} {row['name']:<16} {row['summary']}{source}"]
    for name, about in row["parameters"].items():
        default = "its own default" if about["default"] is None else about["default"]
        lines.append(f"      {name}: {about['type']}, default: {default}")
    lines += [f"      needs {need}" for need in row["needs"]]
    return lines
