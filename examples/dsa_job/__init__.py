"""A training loop on stock megatron-core, without Megatron-LM's training loop.

Model, data parallelism, optimizer, schedules, data sets and distributed checkpoints are Megatron's.
"""
