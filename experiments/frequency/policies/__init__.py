"""Step policies, which execute frequency techniques on a torch model."""
