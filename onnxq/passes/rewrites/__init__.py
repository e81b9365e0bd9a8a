"""Rewrites that leave the float function as it is and let engines find the patterns they have kernels for.

Each keeps graph inputs and outputs, works in If/Loop/Scan bodies as in the main graph, leaves tensors with other
readers alone, never crosses existing Q/DQ pairs, and keeps names: a tensor that keeps its name keeps its value.
"""
