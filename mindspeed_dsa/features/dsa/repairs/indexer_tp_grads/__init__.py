"""The indexer's gradients under tensor parallelism."""
