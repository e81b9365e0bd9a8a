"""Models on engines: the kernels they are made of, their times, and the differences of their answers.

What is particular to an engine is asked of its backend.
"""
