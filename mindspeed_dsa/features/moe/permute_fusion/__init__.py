"""Fused permutation of tokens by expert."""
