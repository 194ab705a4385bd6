"""The trace on disk: schema, streams, files, and how they are read."""
