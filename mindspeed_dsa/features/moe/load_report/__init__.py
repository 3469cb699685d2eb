"""Load of experts and ranks, layer by layer and step by step."""
