"""The zigzag of rows repeated in blocks."""
