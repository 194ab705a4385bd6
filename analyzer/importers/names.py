"""Sanitizes and numbers the names in another tool's trace."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

MAX_NAME: Final = 4096
"""Maximum length of a name; longer names are cut."""


_MAX_BITS: Final = 256
"""Larger integers are not converted to text, which Python refuses for thousands of digits."""


class Codes(dict[Any, int]):
    """Numbers distinct values in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def since(self, code: int) -> list[Any]:
        """The values from a number on, at a cost that grows with those only."""
        newest_first = list(islice(reversed(self), len(self) - code))
        return newest_first[::-1]

    def of(self, values: Iterable[Any]) -> list[int]:
        """The number of each value."""
        return list(map(self.__getitem__, values))


def clean(value: Any, limit: int = MAX_NAME) -> str:
    """Converts a value to a name that can be stored: valid Unicode of bounded length.

    A list or a mapping is not a name; its text could be far longer than the file.
    """
    if not isinstance(value, (str, float)) and (
        not isinstance(value, int) or value.bit_length() > _MAX_BITS
    ):
        value = f"({type(value).__name__})"
    return str(value)[:limit].encode("utf-8", "replace").decode("utf-8")
