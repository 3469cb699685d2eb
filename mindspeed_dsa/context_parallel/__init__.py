"""Rows of a sequence, and its attention, shared by the ranks of a context parallel group."""
