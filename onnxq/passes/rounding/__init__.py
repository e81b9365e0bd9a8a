"""Weights rounded one operator after another, with the errors of those before them in index."""
