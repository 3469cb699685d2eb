"""Our operators behind the kernel hooks of Megatron-core 0.19."""
