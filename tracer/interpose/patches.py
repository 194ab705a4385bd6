"""What the tracer has replaced in PyTorch and in other libraries.

While a rank records nothing (``ddltrace off``), everything that runs for a message, a layer or a
batch is put back as it was, so that the job runs none of the tracer's code there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_ABSENT: Final = object()


@dataclass
class _Patch:
    """One replaced attribute.

    Attributes:
        owner: A class, a module or another object.
        name: The attribute.
        original: Its former value, as in `vars`; `_ABSENT` if it was inherited.
        replacement: Its value while the rank records.
        while_off: Its value while the rank does not record.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any
    while_off: Any

    def change(self, former: Any, value: Any) -> None:
        """Replaces the value, unless somebody else has replaced `former` since."""
        if vars(self.owner).get(self.name, _ABSENT) is not former:
            return
        if value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Patches:
    """Replaces attributes, and can take all replacements out and put them in again.

    An attribute that the job or another library has replaced in the meantime is left as it is.

    Attributes:
        are_in: Whether the replacements are in place.
    """

    def __init__(self) -> None:
        self._patches: list[_Patch] = []
        self.are_in = True

    def put(self, owner: Any, name: str, replacement: Any, *, while_off: Any = _ABSENT) -> None:
        """Replaces an attribute for as long as the rank records.

        Args:
            owner: A class, a module or another object that has a ``__dict__``.
            name: The attribute.
            replacement: Its value while the rank records.
            while_off: Its value otherwise; by default the former value.
        """
        original = vars(owner).get(name, _ABSENT)
        patch = _Patch(
            owner, name, original, replacement, original if while_off is _ABSENT else while_off
        )
        self._patches.append(patch)
        patch.change(original, replacement if self.are_in else patch.while_off)

    def take_out(self) -> None:
        """Puts all attributes back."""
        self.are_in = False
        for patch in reversed(self._patches):
            patch.change(patch.replacement, patch.while_off)

    def put_in(self) -> None:
        """Replaces the attributes again."""
        self.are_in = True
        for patch in self._patches:
            patch.change(patch.while_off, patch.replacement)
