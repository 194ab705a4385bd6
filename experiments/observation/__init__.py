"""Measurements from inside the processes of a job: losses, bytes sent by sockets, memory."""
