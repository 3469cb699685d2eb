"""Metrics of each step of Megatron-LM's training loop."""
