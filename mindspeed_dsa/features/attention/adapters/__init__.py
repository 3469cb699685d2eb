"""Fused DSA in Megatron releases whose interface differs from that of 0.16 to 0.18."""
