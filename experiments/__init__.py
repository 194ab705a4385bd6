"""Communication strategies, run for real in a training job and compared."""
