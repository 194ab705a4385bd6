"""PyTorch profiler (Kineto) files."""
