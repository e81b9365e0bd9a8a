"""How far a quantized model is from the float one: error sums, comparisons, sensitivity, and a person's own metric."""
