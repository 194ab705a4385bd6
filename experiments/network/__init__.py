"""An emulated network of hosts on one machine."""
