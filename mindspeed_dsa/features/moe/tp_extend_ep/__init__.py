"""The tensor parallel ranks hold whole experts instead of slices of all."""
