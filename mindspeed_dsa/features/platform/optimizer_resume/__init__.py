"""Resuming the distributed optimizer on torch's Adam."""
