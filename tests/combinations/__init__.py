"""Random jobs: a layout, a dtype and several features at once, saved and resumed in another layout."""
