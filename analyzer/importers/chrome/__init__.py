"""Chrome trace JSON and Horovod Timeline files."""
