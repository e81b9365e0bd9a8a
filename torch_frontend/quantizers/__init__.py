"""Quantizers of the torch front end, behind one contract.

base        the contract of every quantizer; how to write your own
registry    quantizers by name; `uniform`, a fixed scale from an observer
learned     LSQ, LSQ+ and PACT: learned scales, offsets and clipping levels
borrowed    scales of each run, and those of another site
dorefa      weights through tanh, activations in [0, 1]
adaround    learned rounding
upkeep      legal values, NaN checks and penalties after each training step
statistics  the bridge to onnxq.observers
specs       groups of a scale, legal options and qparams, the node in an ONNX export
"""

# Importing the modules registers their quantizers by name.
from torch_frontend.quantizers.adaround import AdaRound, Rounding
from torch_frontend.quantizers.base import DisabledBy, Quantizer
from torch_frontend.quantizers.borrowed import Dynamic
from torch_frontend.quantizers.dorefa import DoReFa
from torch_frontend.quantizers.learned import LSQ, PACT, LSQPlus
from torch_frontend.quantizers.registry import Uniform, create_quantizer, register_quantizer
from torch_frontend.quantizers.upkeep import PostStep, override_switches, penalty, quantizers_of

__all__ = [
    "LSQ",
    "PACT",
    "AdaRound",
    "DisabledBy",
    "DoReFa",
    "Dynamic",
    "LSQPlus",
    "PostStep",
    "Quantizer",
    "Rounding",
    "Uniform",
    "create_quantizer",
    "override_switches",
    "penalty",
    "quantizers_of",
    "register_quantizer",
]
