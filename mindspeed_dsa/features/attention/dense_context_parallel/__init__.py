"""Context parallelism of dense attention without Transformer Engine."""
