"""The order axis: what a message carries, in which order messages go, and when each may start.

One schedule, one file. None of them imports torch.
"""
