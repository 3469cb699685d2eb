"""Logs the load imbalance of the experts of Megatron's MoE routers."""
