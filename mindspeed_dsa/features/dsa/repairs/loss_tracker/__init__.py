"""The indexer loss in the log."""
