"""TCP connections between the processes of a job: where they listen, and how both ends prove it."""
