"""Digests of the weights before the first step."""
