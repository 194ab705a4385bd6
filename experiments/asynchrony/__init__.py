"""Servers that apply each worker's updates as their synchronization rule says."""
