"""QuantModel, a quantized and trainable copy of a float module.

model      the class: lifecycle and switches
state      the states, and the steps allowed in each
build      trace, simplify, convert, place, attach
places     where each target wants pairs
units      what could be quantized; draft: what is; attach: carries it out
"""

from torch_frontend.quant_model.draft import Decision
from torch_frontend.quant_model.follower import Follower
from torch_frontend.quant_model.model import QuantModel
from torch_frontend.quant_model.state import State

__all__ = ["Decision", "Follower", "QuantModel", "State"]
