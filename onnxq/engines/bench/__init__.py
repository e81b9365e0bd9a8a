"""Time on an engine: models timed side by side, and their kernels beside the times."""
