"""Megatron's seams that several features, or the session itself, meet at."""
