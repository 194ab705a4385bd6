"""What only the processes of a job can tell: losses, bytes that sockets sent, memory."""
