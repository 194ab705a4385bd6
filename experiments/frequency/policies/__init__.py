"""Policies: frequency techniques carried out on a torch model."""
