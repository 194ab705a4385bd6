"""UCX: the library of high-speed networks, here through MPICH, which brings it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "ucx",
    "MPICH over UCX",
    "UCX, openucx.org; mpi4py",
    needs=("pip install 'ddltrace[mpi]'",),
)
@dataclass(frozen=True)
class Ucx(Transport):
    """Sends of MPICH over UCX's TCP transport; shared memory is off, as with `Mpi`."""

    name: ClassVar[str] = "ucx"
    backend: ClassVar[str] = "ucx"
    extra: ClassVar[str | None] = "mpi"
    whole_job: ClassVar[bool] = True

    def environment(self, interface: str | None) -> Mapping[str, str]:
        """Chooses MPICH's network module and the interface; read by `MPI_Init`."""
        # The UCX of MPICH 5.0 finds no route between two loopback addresses.
        device = {} if interface in {None, "lo"} else {"UCX_NET_DEVICES": str(interface)}
        return {
            "MPIR_CVAR_CH4_NETMOD": "ucx",
            "MPIR_CVAR_NOLOCAL": "1",
            "UCX_TLS": "tcp,self",
            "UCX_WARN_UNUSED_ENV_VARS": "n",
            **device,
        }
