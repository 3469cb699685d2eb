"""Latent attention by head between projections by row."""
