"""What the documents show that the package started from, as they show it."""
