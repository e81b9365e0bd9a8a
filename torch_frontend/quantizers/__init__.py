"""Quantizers of the torch front end, behind one contract.

base        what every quantizer is and does; how to write your own
registry    quantizers by name
uniform     fixed scale from an observer
statistics  the bridge to onnxq.observers
limits      what targets can hold
groups      tensor, channel and block
"""

from torch_frontend.quantizers.base import Quantizer
from torch_frontend.quantizers.registry import available_quantizers, create_quantizer, register_quantizer
from torch_frontend.quantizers.uniform import Uniform

__all__ = ["Quantizer", "Uniform", "available_quantizers", "create_quantizer", "register_quantizer"]
