"""Correct pipeline messages over gloo."""
