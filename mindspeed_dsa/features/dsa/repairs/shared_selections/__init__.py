"""Recomputed layers that share a selection of keys."""
