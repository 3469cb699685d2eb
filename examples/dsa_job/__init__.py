"""What `examples/pretrain_dsa.py` is made of, one idea per module.

A small DeepSeek-V3.2-shaped model (MLA with sparse attention, a mixture of experts with a shared
expert, first layer dense) is trained on real text with stock megatron-core: its model, its
distributed data parallelism and optimizer, its pipeline schedules, its data sets and its
distributed checkpoints. Nothing of Megatron-LM's own training loop is needed.
"""
