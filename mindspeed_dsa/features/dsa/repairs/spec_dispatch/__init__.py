"""DSA in Megatron's spec functions."""
