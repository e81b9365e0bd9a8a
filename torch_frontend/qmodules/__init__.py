"""Quantized modules: the operators behind torch's modules, functions and methods, and the classes that replace them.

ops        the operators
registry   modules, functions and methods -> operators; `@register_qmodule`
torch_ops  tables of torch's own modules, functions and methods
layers     layers whose weight is quantized
weight_norm  weight norms multiplied out
calls      functions and methods as modules
"""

from torch_frontend.qmodules import torch_ops as _torch_ops  # fills the registry
from torch_frontend.qmodules.calls import Add, Call, Cat, MatMul, Mul
from torch_frontend.qmodules.layers import (
    WeightQuantized,
    copy_module_tree,
    copy_shallowly,
    copy_with_tensors,
    explain_unconvertible,
    swap_class,
)
from torch_frontend.qmodules.ops import Op
from torch_frontend.qmodules.registry import (
    UNKNOWN,
    Entry,
    find_entry,
    find_layer,
    list_op_names,
    register_qmodule,
    register_targets,
)
from torch_frontend.qmodules.weight_norm import multiply_weight_norms

del _torch_ops

__all__ = [
    "UNKNOWN",
    "Add",
    "Call",
    "Cat",
    "Entry",
    "MatMul",
    "Mul",
    "Op",
    "WeightQuantized",
    "copy_module_tree",
    "copy_shallowly",
    "copy_with_tensors",
    "explain_unconvertible",
    "find_entry",
    "find_layer",
    "list_op_names",
    "multiply_weight_norms",
    "register_qmodule",
    "register_targets",
    "swap_class",
]
