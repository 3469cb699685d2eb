"""Records of released Megatron-core versions: read from wheels, trained on, and shown on generated pages."""
