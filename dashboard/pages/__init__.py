"""The pages other than the timeline."""
