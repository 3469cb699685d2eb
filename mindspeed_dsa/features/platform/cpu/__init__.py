"""Redirections that let Megatron train on a CPU."""
