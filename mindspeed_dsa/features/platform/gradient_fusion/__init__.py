"""Gradient accumulation fusion without Apex."""
