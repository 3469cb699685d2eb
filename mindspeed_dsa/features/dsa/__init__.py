"""DeepSeek Sparse Attention: fused attention, repairs of Megatron's own code, and older releases served."""
