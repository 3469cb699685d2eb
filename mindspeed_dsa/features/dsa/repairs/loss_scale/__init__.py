"""The scale of the indexer loss's gradient."""
