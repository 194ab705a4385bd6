"""NCCL's profiler plugin, a C library that NCCL itself loads, and how a job is started with it."""
