"""Fixes for Megatron's own DSA, and options that it lacks."""
