"""Prove: which kernel of an engine each node and pair of a model became."""
