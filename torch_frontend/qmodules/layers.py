"""Layers with a quantized weight: a layer's class is changed, its Parameters stay the same objects.

A weight norm w = g v / |v| is multiplied out first, as a batch norm is folded: Salimans and Kingma 2016 (arXiv
1602.07868) split a weight so that gradient descent converges faster; the function of the network does not depend on it.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from onnxq.errors import ModelError
from torch_frontend.qmodules.registry import Op, find_layer, register_qmodule


class WeightQuantized(nn.Module):
    """A layer that reads its weight through its child `weight_quantizer`; without one it is the float layer."""

    weight: Tensor

    def quantized_weight(self) -> Tensor:
        """The weight that forward uses."""
        # _modules, not getattr: nn.Module raises AttributeError for a missing child.
        quantizer = self._modules.get("weight_quantizer")
        return self.weight if quantizer is None else quantizer(self.weight)


class _Conv(WeightQuantized):
    """A convolution of any number of axes with a quantized weight."""

    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As torch's class."""
        return self._conv_forward(input, self.quantized_weight(), self.bias)  # type: ignore[operator]


@register_qmodule(nn.Conv1d, op="conv")
class QConv1d(_Conv, nn.Conv1d):
    """Conv1d with a quantized weight."""


@register_qmodule(nn.Conv2d, op="conv")
class QConv2d(_Conv, nn.Conv2d):
    """Conv2d with a quantized weight."""


@register_qmodule(nn.Conv3d, op="conv")
class QConv3d(_Conv, nn.Conv3d):
    """Conv3d with a quantized weight."""


class _ConvTranspose(WeightQuantized):
    """A transposed convolution of any number of axes with a quantized weight."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002 - torch's name
        """As torch's class."""
        dims = len(self.kernel_size)
        # torch chooses among the output sizes that fit by padding; its own helper keeps the rules in one place.
        extra = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        compute = getattr(functional, f"conv_transpose{dims}d")
        weight = self.quantized_weight()
        settings = (self.stride, self.padding, extra, self.groups, self.dilation)
        return compute(input, weight, self.bias, *settings)


@register_qmodule(nn.ConvTranspose1d, op="conv_transpose")
class QConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """ConvTranspose1d with a quantized weight."""


@register_qmodule(nn.ConvTranspose2d, op="conv_transpose")
class QConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """ConvTranspose2d with a quantized weight."""


@register_qmodule(nn.ConvTranspose3d, op="conv_transpose")
class QConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """ConvTranspose3d with a quantized weight."""


@register_qmodule(nn.Linear, op="linear")
class QLinear(WeightQuantized, nn.Linear):
    """Linear with a quantized weight."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As nn.Linear."""
        return functional.linear(input, self.quantized_weight(), self.bias)


@register_qmodule(nn.modules.linear.NonDynamicallyQuantizableLinear, op="linear")
class QProjection(QLinear, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """The output projection of nn.MultiheadAttention, a Linear with a class of its own."""


_TURNED = Op(
    name="linear", onnx=("MatMul", "Gemm"), weight="weight", weight_axis=1, block_axis=0, channel=-1
)


@register_qmodule("transformers.pytorch_utils.Conv1D", op=_TURNED, params=("x",))
class QTurnedLinear(WeightQuantized):
    """The layer of GPT-2 in transformers: a Linear with its weight as [in, out], quantized."""

    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """As transformers' class."""
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.quantized_weight())
        return rows.reshape(*x.shape[:-1], -1)


@register_qmodule(nn.Bilinear, op="bilinear")
class QBilinear(WeightQuantized, nn.Bilinear):
    """Bilinear with a quantized weight."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """As nn.Bilinear."""
        return functional.bilinear(input1, input2, self.quantized_weight(), self.bias)


@register_qmodule(nn.Embedding, op="embedding")
class QEmbedding(WeightQuantized, nn.Embedding):
    """Embedding with a quantized table; one with max_norm is not converted."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """As nn.Embedding."""
        # None: max_norm, which explain_unconvertible() refuses. False: the backward takes no sparse gradients.
        return functional.embedding(
            input,
            self.quantized_weight(),
            self.padding_idx,
            None,
            self.norm_type,
            self.scale_grad_by_freq,
            False,
        )


def swap_class(module: nn.Module) -> nn.Module:
    """A shallow copy of the layer in its quantized class: Parameters, buffers and hooks are the same objects.

    Raises ModelError for a layer without a quantized class.
    """
    # Changing the class of a copy keeps parameters, buffers, hooks and names, whatever the constructor would need.
    registration = find_layer(module)
    if registration is None or registration.qmodule is None:
        raise ModelError(
            type(module).__name__,
            "has no quantized class",
            "register one with @register_qmodule",
            code="Q123",
        )
    copy_ = copy_shallowly(module)
    copy_.__class__ = registration.qmodule
    return copy_


def copy_shallowly(module: nn.Module) -> nn.Module:
    """A copy that shares tensors and children, with tables of its own for parameters, buffers, children and hooks."""
    # copy.copy would ask for a state to pickle, which parametrized modules refuse.
    shallow = object.__new__(type(module))
    shallow.__dict__ = dict(module.__dict__)
    for name, table in module.__dict__.items():
        # Shared tables would let a quantizer added here appear in the user's model.
        if (
            name in ("_parameters", "_buffers", "_modules")
            or name.endswith("_hooks")
            or "_hooks_" in name
        ):
            shallow.__dict__[name] = copy.copy(table)
    return shallow


def copy_module_tree(model: nn.Module, memo: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A copy of the module tree with the same tensors. memo: module -> its copy."""
    memo = {} if memo is None else memo
    if model not in memo:
        memo[model] = shallow = copy_shallowly(model)
        for name, child in shallow._modules.items():
            shallow._modules[name] = None if child is None else copy_module_tree(child, memo)
    return memo[model]


def copy_with_tensors(model: nn.Module) -> nn.Module:
    """A copy of a module and its tensors; those that it computed for its next call, as pruned weights, as values."""
    # deepcopy refuses tensors that have a gradient function.
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    ]
    return copy.deepcopy(
        model, {id(value): value.detach().clone() for value in computed if not value.is_leaf}
    )


def explain_unconvertible(module: nn.Module) -> str | None:
    """Reason why a layer cannot take its quantized class, or None."""
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm writes into the table at every call"
    # weight_norm and prune of torch.nn.utils keep weight_g and weight_orig; parametrizations leave no "weight".
    computing = ("weight_g", "weight_orig", "parametrizations")
    if any(hasattr(module, name) for name in computing) or "weight" not in module._parameters:
        return "its weight is computed (parametrized, weight-normed or lazy)"
    return None


def multiply_weight_norms(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """(model, paths of its layers whose weight norm is multiplied out); a copy with the same tensors if any is."""
    paths = [path for path, module in model.named_modules() if path and _has_weight_norm(module)]
    if not paths:
        return model, []
    tree = copy_module_tree(model)
    layers = map(tree.get_submodule, paths)
    replace_modules(tree, {layer: _make_plain(layer) for layer in layers})
    return tree, paths


def replace_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the place of these, in place; one under two names stays one."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in others:
            model.set_submodule(path, others[module])


def _has_weight_norm(module: nn.Module) -> bool:
    if any(
        isinstance(hook, WeightNorm) and hook.name == "weight"
        for hook in module._forward_pre_hooks.values()
    ):
        return True
    if not parametrize.is_parametrized(module) or list(module.parametrizations) != ["weight"]:  # type: ignore[arg-type]
        return False
    chain = module.parametrizations["weight"]  # type: ignore[index]
    return len(chain) == 1 and isinstance(chain[0], parametrizations._WeightNorm)


def _make_plain(layer: nn.Module) -> nn.Module:
    """The layer with the weight that its weight norm gives now."""
    plain = copy_shallowly(layer)
    if not parametrize.is_parametrized(layer):
        return remove_weight_norm(plain)
    # torch makes a class for each parametrized layer, below the layer's own.
    plain.__class__ = type(layer).__base__
    del plain._modules["parametrizations"]
    plain.weight = nn.Parameter(layer.weight.detach().clone())
    return plain
