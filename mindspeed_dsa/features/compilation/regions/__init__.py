"""Regional compilation: see ``feature.py``."""
