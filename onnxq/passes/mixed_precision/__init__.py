"""Which operators and weights get more bits, or stay float, by what they cost the outputs."""
