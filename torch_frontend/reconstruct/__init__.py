"""Reconstruction: learn the rounding of weights from a few samples, for outputs of layers or blocks as in float.

run       reconstruct(): AdaRound layer by layer, BRECQ block by block, QDrop with either
settings  its options, progress and results
blocks    layers and residual blocks in a graph
units     parts of a model that run alone, with the inputs they have in the model
cache     inputs and targets of a unit, in memory or in a file
learn     the optimization of one unit
"""

from torch_frontend.reconstruct.run import as_adaround, reconstruct
from torch_frontend.reconstruct.settings import Progress, Reconstruction, Settings, UnitResult

__all__ = ["Progress", "Reconstruction", "Settings", "UnitResult", "as_adaround", "reconstruct"]
