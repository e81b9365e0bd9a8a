"""Reconstruction: learn the rounding of weights from a few samples, for outputs of layers or blocks as in float.

run       reconstruct(): AdaRound layer by layer, BRECQ block by block, QDrop with either
units     layers and residual blocks in a graph, as parts that run alone
cache     inputs and targets of a unit, in memory or in a file
learn     options, progress and results; the optimization of one unit
"""

from torch_frontend.reconstruct.learn import LearningProgress, Reconstruction, Settings, UnitResult
from torch_frontend.reconstruct.run import as_adaround, reconstruct

__all__ = [
    "LearningProgress",
    "Reconstruction",
    "Settings",
    "UnitResult",
    "as_adaround",
    "reconstruct",
]
