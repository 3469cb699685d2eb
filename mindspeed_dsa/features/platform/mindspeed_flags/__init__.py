"""Command lines that were written for MindSpeed."""
