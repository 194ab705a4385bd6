"""The optimizer axis: rules that replace the arithmetic of the job's optimizer."""
