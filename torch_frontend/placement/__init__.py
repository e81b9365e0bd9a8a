"""Where quantizers stand: the engine's planner, on a torch module.

graph   the planner's graph protocol over torch calls
lower   a traced module as such a graph, in the nodes that its export has; untraced ones layer by layer
rules   the front end's additions to a target's rules, and how its rules name calls
pairs   the planner's sites as quantizers to be, and the account of all products
"""
