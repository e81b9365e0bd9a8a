"""Diff: a quantized model compared with its float one, and engines with each other. The only user of Polygraphy."""
