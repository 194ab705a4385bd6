"""The kinds of NCCL's events, and where they are recorded."""

from __future__ import annotations

from typing import Final

KINDS: Final = (
    *("group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl", "kernel_ch", "net_plugin"),
    *("group_api", "coll_api", "p2p_api", "kernel_launch", "ce_coll", "ce_sync", "ce_batch"),
    "kernel_phase",
)
"""Their names, in the order of their bits in NCCL's mask."""

DIRECTORY_VARIABLE: Final = "DDLTRACE_NCCL_DIR"
"""The environment variable with the directory of the rings."""
