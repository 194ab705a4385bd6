"""The transport axis: the message library that carries a strategy's messages.

A module here describes one library and knows nothing of PyTorch; `backends` makes a backend of
`torch.distributed` of each.
"""
