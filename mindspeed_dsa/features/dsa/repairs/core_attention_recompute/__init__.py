"""Selective recomputation of the core attention with DSA."""
