"""Rotary position embedding as one operator."""
