"""Layers that wait out given device times, so that few cores can stand for many devices."""
