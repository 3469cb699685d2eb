"""A training loop around stock megatron-core, without Megatron-LM's own.

Model, data parallelism, optimizer, schedules, data sets and distributed checkpoints are Megatron's.
"""
