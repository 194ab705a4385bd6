"""MPI: mpi4py over MPICH, whose network modules are libfabric (OFI) and UCX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique
from ddltrace.experiments.transports.transport import Transport


@technique(
    "transport",
    "mpi",
    "MPICH over libfabric",
    "MPICH, mpich.org; mpi4py",
    needs=("pip install 'ddltrace[mpi]'",),
)
@dataclass(frozen=True)
class Mpi(Transport):
    """Sends of MPICH over libfabric's TCP provider.

    Shared memory is off, so that ranks of one host use the network, too, as with the other
    transports.
    """

    name: ClassVar[str] = "mpi"
    # PyTorch keeps the name "mpi" for a backend that its releases do not have.
    backend: ClassVar[str] = "mpi4py"
    extra: ClassVar[str | None] = "mpi"
    whole_job: ClassVar[bool] = True

    def environment(self, interface: str | None) -> Mapping[str, str]:
        """Chooses MPICH's network module and the interface; read by `MPI_Init`."""
        device = {} if interface is None else {"FI_TCP_IFACE": interface}
        return {
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "MPIR_CVAR_NOLOCAL": "1",
            "FI_PROVIDER": "tcp",
            **device,
        }
