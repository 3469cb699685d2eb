"""The indexer's rotary dimensions in DeepSeek's order."""
