"""No indexer loss computation if the loss is not used."""
