"""Exact pipeline messages over gloo."""
