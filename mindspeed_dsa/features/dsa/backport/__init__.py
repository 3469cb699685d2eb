"""DSA for Megatron-core releases that have none (0.12.1 to 0.15.3)."""
