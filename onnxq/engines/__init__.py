"""Engines: what runs a model, which kernel each part of it became, and how far the engines' answers are apart.

The only user of Polygraphy and TensorRT, which load at first use.
"""
