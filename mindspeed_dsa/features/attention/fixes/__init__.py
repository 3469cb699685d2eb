"""Repairs of Megatron's own DSA, and choices that it lacks."""
