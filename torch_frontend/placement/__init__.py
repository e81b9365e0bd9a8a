"""Where quantizers stand: the engine's planner, on a torch module.

graph   the planner's graph protocol over torch calls
lower   a traced module as such a graph, in the nodes that its export has
types   ONNX's operators for torch's calls
layers  modules that cannot be traced, layer by layer, as such a graph
rules   the front end's additions to a target's rules, and how its rules name calls
pairs   the planner's sites as quantizers to be
slots   arguments of calls
"""

from torch_frontend.placement.graph import Argument, CallGraph, Weight
from torch_frontend.placement.layers import list_children, lower_layers, name_input
from torch_frontend.placement.lower import lower_model
from torch_frontend.placement.pairs import Decision, Pair, Pairs, bind_sums, plan_pairs
from torch_frontend.placement.rules import CallRequests, check_policies
from torch_frontend.placement.slots import Slot, fill_slot, find_slots

__all__ = [
    "Argument",
    "CallGraph",
    "CallRequests",
    "Decision",
    "Pair",
    "Pairs",
    "Slot",
    "Weight",
    "bind_sums",
    "check_policies",
    "fill_slot",
    "find_slots",
    "list_children",
    "lower_layers",
    "lower_model",
    "name_input",
    "plan_pairs",
]
