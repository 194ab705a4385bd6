"""Short forms of kernels' names, which are C++ signatures of hundreds of characters."""

from __future__ import annotations

import re
from typing import Final

from ddltrace.analyzer.formatting.text_table import shorten
from ddltrace.analyzer.formatting.units import printable

_NAMESPACE: Final = re.compile(r"(?:\b[A-Za-z_]\w*|\(anonymous namespace\))::")
_RETURN_TYPE: Final = "void "


def kernel_text(name: str, width: int) -> str:
    """Returns the start of the name of a kernel or operator within a width.

    Names of templates and functions lose their namespaces; ``aten::mm`` stays as it is.
    Kernels of one template differ in its arguments only, which namespaces would push out of a
    column: ``vectorized_elementwise_kernel<4, FillFunctor<int>, ...``.
    """
    text = printable(name).removeprefix(_RETURN_TYPE)
    if "<" in text or "(" in text:
        text = _NAMESPACE.sub("", text)
    return shorten(text, width, "start")
