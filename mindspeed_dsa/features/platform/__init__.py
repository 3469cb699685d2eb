"""Redirections that Megatron needs to run on a platform."""
