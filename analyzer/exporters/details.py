"""Details of an event for trace viewers: its message and its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddltrace.tracer.trace.run_info import TensorInfo

_COLUMNS: Final = (
    *("step", "phase", "op", "group", "seq", "peer", "tag", "bytes", "out_bytes", "wire_bytes"),
    *("dtype", "status", "clock", "seam", "shapes", "samples", "tokens", "flops"),
)
_MAX_TENSORS: Final = 64
BATCH: Final = 1 << 16


def details_of(table: pa.Table, tensors: Sequence[TensorInfo]) -> dict[str, pa.Array]:
    """The columns worth showing: name -> values, for those that are not null throughout.

    Args:
        table: Some events.
        tensors: The tensors that their ids refer to.
    """
    columns = {name: table[name].combine_chunks() for name in _COLUMNS}
    columns["tensors"] = _names(table["tensors"].combine_chunks(), tensors)
    return {name: column for name, column in columns.items() if column.null_count < len(column)}


def _names(lists: pa.Array, tensors: Sequence[TensorInfo]) -> pa.Array:
    """Text in place of each list of ids; null where it is empty."""
    names = {tensor.id: tensor.name for tensor in tensors}
    texts: list[str | None] = [None] * len(lists)
    filled = pc.fill_null(pc.greater(pc.list_value_length(lists), 0), False)
    for row in pc.indices_nonzero(filled).to_pylist():
        ids = lists[row].as_py()
        shown = [names.get(number, f"tensor {number}") for number in ids[:_MAX_TENSORS]]
        more = len(ids) - len(shown)
        texts[row] = ", ".join(shown) + (f" and {more} more" if more else "")
    return pa.array(texts, pa.string()).dictionary_encode()
