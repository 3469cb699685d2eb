"""Integration points in Megatron that several features, or the session itself, share."""
