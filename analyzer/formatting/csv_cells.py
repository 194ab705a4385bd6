"""Cells of CSV files that no spreadsheet evaluates."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

# The wide forms of the four characters as well, which some spreadsheets take for them.
_FORMULA: Final = r"^\s*[=+\-@\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}]|^[\t\r\n]"
_NUMBER: Final = r"^[+-]?[0-9.,]+([eE][+-]?[0-9]+)?$"


def without_formulas(texts: Any) -> Any:
    """Texts that a spreadsheet does not run as formulas: names come from the trace.

    Args:
        texts: An Arrow array of strings, or one of another type, which is returned as it is.

    Returns:
        The texts, with an apostrophe before those that begin like a formula and are not numbers.
    """
    if isinstance(texts.type, pa.BaseExtensionType):
        texts = texts.cast(texts.type.storage_type)
    if pa.types.is_dictionary(texts.type):
        texts = texts.cast(texts.type.value_type)
    if pa.types.is_large_string(texts.type) or pa.types.is_string_view(texts.type):
        texts = texts.cast(pa.string())
    if not pa.types.is_string(texts.type):
        return texts
    runs = pc.and_not(
        pc.match_substring_regex(texts, _FORMULA), pc.match_substring_regex(texts, _NUMBER)
    )
    return pc.if_else(runs, pc.binary_join_element_wise("'", texts, ""), texts)


def names_without_formulas(names: list[str]) -> list[str]:
    """The heads of columns, as `without_formulas`."""
    found: list[str] = without_formulas(pa.array(names, pa.string())).to_pylist()
    return found
