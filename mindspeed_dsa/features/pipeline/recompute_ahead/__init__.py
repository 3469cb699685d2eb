"""Recomputation while a pipeline rank waits for a gradient."""
