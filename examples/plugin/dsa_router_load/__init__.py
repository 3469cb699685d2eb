"""Logs how unevenly Megatron's MoE routers load their experts."""
