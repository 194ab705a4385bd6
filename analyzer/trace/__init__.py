"""A trace opened: read, validated, its clocks aligned."""
