"""Passes: rewrites of the float graph, equalization, and everything that makes a calibrated plan better.

`registry.PASSES` lists them in their order, `runner` runs them, `base` defines their arguments and results.
"""
