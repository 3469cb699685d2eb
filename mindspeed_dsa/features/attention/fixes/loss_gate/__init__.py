"""No indexer-loss work without an indexer loss."""
