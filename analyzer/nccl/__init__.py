"""Events of NCCL itself, as its profiler plugin records them: rings read, merged, measured."""
