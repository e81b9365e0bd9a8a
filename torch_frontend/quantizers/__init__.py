"""Quantizers of the torch front end, behind one contract.

base        the contract of every quantizer; how to write your own
registry    quantizers by name
uniform     fixed scale from an observer
lsq         learned scale
lsq_plus    learned scale and offset
pact        learned clipping level
dynamic     activations on scales of each run
dorefa      weights through tanh, activations in [0, 1]
adaround    learned rounding
upkeep      legal values, NaN checks and penalties after each training step
marker      the node of a quantizer in an ONNX export
statistics  the bridge to onnxq.observers
limits      checks of options, specs and qparams
groups      tensor, channel and block
"""

# Importing the modules registers their quantizers by name.
from torch_frontend.quantizers.adaround import AdaRound, Rounding
from torch_frontend.quantizers.base import DisabledBy, Quantizer
from torch_frontend.quantizers.dorefa import DoReFa
from torch_frontend.quantizers.dynamic import Dynamic
from torch_frontend.quantizers.lsq import LSQ
from torch_frontend.quantizers.lsq_plus import LSQPlus
from torch_frontend.quantizers.pact import PACT
from torch_frontend.quantizers.registry import create_quantizer, register_quantizer
from torch_frontend.quantizers.uniform import Uniform
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
