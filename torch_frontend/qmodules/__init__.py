"""Quantized modules: the operators behind torch's modules, functions and methods, and the classes that replace them.

registry   operators and the modules, functions and methods that call them; `@register_qmodule`
operators  (YAML) all of torch's own
layers     layers whose weight is quantized; weight norms multiplied out
calls      functions and methods as modules
"""

from torch_frontend.qmodules.calls import Add, Call, Cat, MatMul, Mul
from torch_frontend.qmodules.layers import (
    WeightQuantized,
    copy_module_tree,
    copy_shallowly,
    copy_with_tensors,
    explain_unconvertible,
    multiply_weight_norms,
    swap_class,
)
from torch_frontend.qmodules.registry import (
    UNKNOWN,
    Op,
    Registration,
    find_entry,
    find_layer,
    list_op_names,
    register_qmodule,
    register_targets,
)

__all__ = [
    "UNKNOWN",
    "Add",
    "Call",
    "Cat",
    "MatMul",
    "Mul",
    "Op",
    "Registration",
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
