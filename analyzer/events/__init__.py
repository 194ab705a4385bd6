"""One rank: its events as columns, its messages, activities and timeline."""
