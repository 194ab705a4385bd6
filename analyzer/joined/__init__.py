"""All ranks: collectives and point-to-point messages joined, slack, the critical path."""
