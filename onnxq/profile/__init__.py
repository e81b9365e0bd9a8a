"""What each quantized site, node and stretch of the network costs at the outputs."""

from onnxq.profile.measure import Errors, Setting, measure
from onnxq.profile.model import KINDS, GroupCost, OutputCost, Profile, Reach, decibel
from onnxq.profile.scan import by_node, profile_pairs, stretches
from onnxq.profile.switch import Switch, Switchboard, switchboard

__all__ = [
    "KINDS",
    "Errors",
    "GroupCost",
    "OutputCost",
    "Profile",
    "Reach",
    "Setting",
    "Switch",
    "Switchboard",
    "by_node",
    "decibel",
    "measure",
    "profile_pairs",
    "stretches",
    "switchboard",
]
