"""Opens traces: reads and validates them, and aligns their clocks."""
