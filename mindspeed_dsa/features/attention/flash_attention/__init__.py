"""Megatron's dense attention on one context parallel rank, by the dense attention operator."""
