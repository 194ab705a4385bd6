"""Clocks: of this process, of other hosts, of devices."""
