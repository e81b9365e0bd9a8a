"""Engines that run a model: building them, the kernels they are made of, and the differences of their answers.

The only user of Polygraphy and TensorRT, which load at first use.
"""
