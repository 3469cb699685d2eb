"""Benchmarks. ``python -m benchmarks CASE``; the last line printed is one JSON object."""
