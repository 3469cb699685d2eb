"""Host time by module class: see ``feature.py``."""
