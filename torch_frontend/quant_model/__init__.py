"""QuantModel, a quantized and trainable copy of a float module.

model        the class: lifecycle and switches
state        the states, the steps allowed in each, and switches
float_state  checkpoints of the float network, by their own names
build        trace, simplify, convert, place, attach
attach       carries out a placement, on a graph or layer by layer
ancestor     Sparsebit's names
"""

from torch_frontend.placement.pairs import Decision
from torch_frontend.quant_model.float_state import PartialStateWarning
from torch_frontend.quant_model.model import QuantModel
from torch_frontend.quant_model.state import State
from torch_frontend.quantizers.borrowed import Follower

__all__ = ["Decision", "Follower", "PartialStateWarning", "QuantModel", "State"]
