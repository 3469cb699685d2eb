"""The indexer's Hadamard rotation on any device."""
