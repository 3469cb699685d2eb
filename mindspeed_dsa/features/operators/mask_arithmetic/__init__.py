"""Selection by a mask without a search for the places where it is true."""
