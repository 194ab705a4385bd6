"""Servers that apply the updates of each worker according to a synchronization rule."""
