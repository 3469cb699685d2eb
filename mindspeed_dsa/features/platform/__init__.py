"""Redirections without which Megatron does not run on a platform."""
