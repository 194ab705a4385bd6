"""Names for parameters, gradients and modules."""
