"""The indexer loss's gradient under Megatron's own context parallelism."""
