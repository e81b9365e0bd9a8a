"""Which operators and weights get more bits, or stay float, by their cost at the outputs."""
