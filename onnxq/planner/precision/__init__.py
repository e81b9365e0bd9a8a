"""Float types around the pairs."""
