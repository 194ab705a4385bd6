"""The layout of the memory that C++ and Python share, parsed from the header that declares it.

`layout.h` declares every field once. C++ generates its structures from these lists, and this module
the positions at which Python reads and writes. A library reports its layout when it is loaded, so
a library that was compiled from another header is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_HEADER: Final = Path(__file__).with_name("layout.h")
_LIST: Final = re.compile(r"^#define DDLTRACE_(\w+)\(FIELD\)((?:.*\\\n)*.*)$", re.MULTILINE)
_FIELD: Final = re.compile(r"FIELD\((\w+)\)")


class Layout:
    """The fields of one structure, integers of 64 bits each.

    Args:
        fields: Their names, in order.
    """

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self._places = {name: place for place, name in enumerate(fields)}

    def __getitem__(self, name: str) -> int:
        """The place of a field.

        Raises:
            KeyError: There is no such field.
        """
        return self._places[name]

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)


def _read(header: str) -> dict[str, Layout]:
    """The structures of a header, by name."""
    return {name: Layout(tuple(_FIELD.findall(fields))) for name, fields in _LIST.findall(header)}


_LAYOUTS: Final = _read(_HEADER.read_text(encoding="utf-8"))

CONTROL: Final = _LAYOUTS["CONTROL"]
SLOT: Final = _LAYOUTS["SLOT"]
MESSAGE: Final = _LAYOUTS["MESSAGE"]
OFFER: Final = _LAYOUTS["OFFER"]
GRADIENT_CONTROL: Final = _LAYOUTS["GRADIENT_CONTROL"]
GRADIENT: Final = _LAYOUTS["GRADIENT"]

TEXT: Final = "".join(
    f"{name} {''.join(f'{field} ' for field in layout)}" for name, layout in _LAYOUTS.items()
)
"""The layout that a library compiled from the same header reports."""
