"""Platforms."""

def detect(requested="auto"):
    return "cpu" if requested == "auto" else requested

def prepare(name, needed):
    pass
