"""The base of all transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


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
