"""Experts whose weights lie in one parameter and are multiplied by one operator."""
