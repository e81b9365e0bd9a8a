"""Reconstruction: weights learn to round so that layers or blocks give what they give in float, from a few samples.

run       reconstruct(): AdaRound layer by layer, BRECQ block by block, QDrop with either
settings  its knobs, progress and results
blocks    layers and residual blocks in a graph
units     parts of a model that run alone, and how their inputs are caught
cache     inputs and targets of a unit, in memory or in a file
learn     the optimization of one unit
"""

from torch_frontend.reconstruct.run import as_adaround, reconstruct
from torch_frontend.reconstruct.settings import Progress, Reconstruction, Settings, UnitResult

__all__ = ["Progress", "Reconstruction", "Settings", "UnitResult", "as_adaround", "reconstruct"]
