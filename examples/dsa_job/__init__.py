"""What `examples/pretrain_dsa.py` is made of: a training loop around stock megatron-core.

Model, data parallelism, optimizer, pipeline schedules, data sets and distributed checkpoints are
Megatron's; nothing of Megatron-LM's own training loop is needed.
"""
