"""The frequency axis: at which optimizer steps the ranks exchange, and what."""
