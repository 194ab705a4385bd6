"""Engines, which execute the parts of an analysis: in this process, or on a Dask cluster."""
