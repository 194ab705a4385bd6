"""Message libraries as backends of `torch.distributed`.

A process group made with such a backend carries every message of `torch.distributed` over that
library, so the tracer records the messages as it records those of any other backend.
"""
