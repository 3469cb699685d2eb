"""Documents of a pack attend to themselves only."""
