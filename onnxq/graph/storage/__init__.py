"""Weights in files: read, mapped and written without being in memory all at once."""
