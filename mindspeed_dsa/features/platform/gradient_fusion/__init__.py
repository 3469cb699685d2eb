"""Gradient accumulation fusion without Apex: what Megatron's linear layers call."""
