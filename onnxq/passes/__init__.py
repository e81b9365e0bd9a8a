"""Passes: rewrites of the float graph, equalization, and everything that makes a calibrated plan better.

`registry.PASSES` lists them in their order, `runner` runs them, `base` says what each takes and gives back.
"""
