"""Everything about collectives, sends and receives: how each is seen, timed and numbered."""
