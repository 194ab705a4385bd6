"""The transports: message libraries, described without loading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ddltrace.experiments.technique import technique


@dataclass(frozen=True)
class Transport:
    """A message library.

    Attributes:
        name: Its name in a strategy's spec.
        backend: Its name as a backend of `torch.distributed`.
        extra: The extra of ddltrace that installs it; None if PyTorch brings it.
        device: The devices whose tensors it sends: ``cpu`` or ``cuda``.
        whole_job: Whether a group has to be all ranks of the job, and nothing else.
        environment: Variables that the library reads when it is loaded.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    extra: ClassVar[str | None] = None
    device: ClassVar[str] = "cpu"
    whole_job: ClassVar[bool] = False

    def environment(self, interface: str | None) -> Mapping[str, str]:
        """Variables that the library reads when it is loaded.

        Args:
            interface: The network interface to use; None leaves the choice to the library.
        """
        del interface
        return {}


@technique(
    "transport",
    "gloo",
    "TCP sockets between processes on the CPU; the default there",
    "Gloo, github.com/pytorch/gloo",
)
@dataclass(frozen=True)
class Gloo(Transport):
    """Sends and collectives of Gloo over TCP sockets."""

    name: ClassVar[str] = "gloo"
    backend: ClassVar[str] = "gloo"


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


@technique(
    "transport",
    "zmq",
    "ZeroMQ's queues over TCP",
    "ZeroMQ, zeromq.org; pyzmq",
    needs=("pip install 'ddltrace[zmq]'",),
)
@dataclass(frozen=True)
class ZeroMq(Transport):
    """One PUSH and PULL pair of sockets in each direction between two ranks."""

    name: ClassVar[str] = "zmq"
    backend: ClassVar[str] = "zmq"
    extra: ClassVar[str | None] = "zmq"


@technique(
    "transport",
    "grpc",
    "gRPC's streams over HTTP/2",
    "gRPC, grpc.io; grpcio",
    needs=("pip install 'ddltrace[grpc]'",),
)
@dataclass(frozen=True)
class Grpc(Transport):
    """One client stream in each direction between two ranks; payloads are not serialized."""

    name: ClassVar[str] = "grpc"
    backend: ClassVar[str] = "grpc"
    extra: ClassVar[str | None] = "grpc"


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


@technique(
    "transport",
    "nccl",
    "NVIDIA's library between GPUs; the default there",
    "NCCL, developer.nvidia.com/nccl",
    needs=("a GPU for each rank",),
)
@dataclass(frozen=True)
class Nccl(Transport):
    """Sends and collectives of NCCL; needs a GPU for each rank."""

    name: ClassVar[str] = "nccl"
    backend: ClassVar[str] = "nccl"
    device: ClassVar[str] = "cuda"


MAX_CONNECTIONS = 64
MAX_BUFFER_KB = 1 << 20


@technique(
    "transport",
    "tcp",
    "TCP sockets without a library, with the protocol's options",
    "RFC 9293; Nagle: RFC 896",
)
@dataclass(frozen=True)
class Tcp(Transport):
    """Connections between each two ranks, without a message library.

    Attributes:
        nagle: Whether the kernel delays small segments until earlier ones are acknowledged
            (RFC 896); else TCP_NODELAY is set.
        buffer_kb: Size of the send and receive buffers in KiB (SO_SNDBUF, SO_RCVBUF; Linux doubles
            it, and limits it to net.core.wmem_max and rmem_max); None lets the kernel tune them.
        congestion: Congestion control (TCP_CONGESTION), such as ``cubic`` or ``reno``; None leaves
            the kernel's default.
        connections: Connections between two ranks; a large message is divided over all of them.
    """

    name: ClassVar[str] = "tcp"
    backend: ClassVar[str] = "tcp"

    nagle: bool = False
    buffer_kb: int | None = None
    congestion: str | None = None
    connections: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ValueError(f"connections must be 1 to {MAX_CONNECTIONS}")
        if self.buffer_kb is not None and not 1 <= self.buffer_kb <= MAX_BUFFER_KB:
            raise ValueError(f"buffer_kb must be 1 to {MAX_BUFFER_KB}")
