"""Where quantizers stand: the engine's planner, on a torch module.

graph   the planner's graph protocol over torch calls
lower   a traced module as such a graph, in the nodes that its export has
types   ONNX's operators for torch's calls
layers  modules that cannot be traced, layer by layer, as such a graph
rules   the front end's additions to a target's rules, and how its rules name calls
pairs   the planner's sites as quantizers to be
products the account of all products
slots   traced calls and their arguments
"""
