"""The indexer reads the normalised latent query."""
