"""The query string of a page's address: the trace shown, and the state of the page's view."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, urlencode

EXPERIMENTS_PATH: Final = "/experiments"

_MAX_DIGITS = 9
_MAX_TEXT = 1 << 15


@dataclass(frozen=True)
class Address:
    """The parsed query string of an address; unknown and malformed parts are ignored.

    Attributes:
        values: The first value of each key.
    """

    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, search: str | None) -> Address:
        """Reads a query string, with or without its ``?``."""
        found = parse_qs((search or "").lstrip("?"))
        return cls({key: values[0][:_MAX_TEXT] for key, values in found.items()})

    def number(self, key: str, default: int) -> int:
        """An integer of at most 9 digits; the default for any other value."""
        text = self.values.get(key, "")
        valid = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
        return int(text) if valid else default

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of some choices; the first one for any other value."""
        value = self.values.get(key, "")
        return value if value in choices else choices[0]

    def text(self, key: str) -> str:
        """A text; empty if there is none."""
        return self.values.get(key, "")

    @property
    def trace(self) -> int:
        """Number of the trace that pages of one trace show; the comparison calls it ``a``."""
        return self.number("trace", self.number("a", 0))

    def link(self, path: str, **changes: str | int | None) -> str:
        """An address with these values and some changes; None removes a key."""
        values = {**self.values, **{key: str(v) for key, v in changes.items() if v is not None}}
        for key, value in changes.items():
            if value is None:
                values.pop(key, None)
        return f"{path}?{urlencode(values)}" if values else path
