"""DSA without Transformer Engine."""
