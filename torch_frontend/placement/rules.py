"""The front end's additions to a target's rules: operators of torch for no engine, and the person's `multi_input`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from onnxq.backends import Candidate, Output, PlacementRule, Target, find_target
from onnxq.config import Config, MultiInput, suggest_names
from onnxq.errors import ConfigError
from onnxq.graph import NodeRef
from onnxq.planner.requests import Requests
from onnxq.sites import Names, Unquantized
from onnxq.wording import list_fields
from torch_frontend.placement.graph import read_call
from torch_frontend.qmodules import list_op_names

_RULE = partial(PlacementRule, why="a pair on what it reads", output=Output.FLOAT, compute=True)
# No engine limits it, and here no engine's file does either: what reads an activation may have it quantized.
VIRTUAL_RULES = (
    _RULE(
        name="one-operand",
        ops=(
            "Relu",
            "Clip",
            "LeakyRelu",
            "PRelu",
            "Elu",
            "Sigmoid",
            "Gelu",
            "Mish",
            "HardSigmoid",
            "HardSwish",
            "Tanh",
            "Softplus",
            "torch.glu",
            "BatchNormalization",
            "GroupNormalization",
            "InstanceNormalization",
            "RMSNormalization",
            "LogSoftmax",
            "ReduceSum",
        ),
    ),
    _RULE(name="attention", ops=("Attention",), data=(0, 1, 2)),
    _RULE(name="bilinear", ops=("Einsum",), data=(0, 1), weight=2),
    _RULE(
        name="embedding",
        ops=("torch.embedding",),
        why="its table",
        weight=0,
        inputs=lambda _: (),
    ),
)

_NONE = _RULE(name="multi-input", ops=(), why="as torch.multi_input asks")


@dataclass(frozen=True, kw_only=True)
class FrontEndTarget(Target):
    """A target whose rules the person changed for some of torch's operators."""

    policies: Mapping[str, MultiInput] = field(default_factory=dict)

    def rule_for(self, candidate: Candidate) -> tuple[PlacementRule | None, Unquantized | None]:
        """The rule that quantizes this node, as `torch.multi_input` changes it; or why none does."""
        rule, reason = super().rule_for(candidate)
        op = read_call(candidate.node).op
        policy = self.policies.get(op.name)
        if policy is None:
            return rule, reason
        if policy.policy == "none":
            # The policy is of inputs: a weight is quantized all the same.
            has_weight = rule is not None and rule.weight is not None
            return (
                replace(rule, inputs=lambda _: (), output=Output.FLOAT) if has_weight else None
            ), None
        # What only moves values gives them out in the scale of its inputs.
        alike = policy.policy in ("share", "follow")
        data = () if rule is None or rule.weight is None else rule.data
        changed = replace(
            rule or _NONE,
            data=data,
            inputs=None,
            compute=True,
            joins=False,
            alike=alike,
            shares=alike and op.moves,
        )
        return changed, None


def front_end_target(config: Config) -> FrontEndTarget:
    """The configuration's target with the front end's additions.

    Raises ConfigError where some activations are asked for on scales of each run beside others.
    """
    apart = config.activations.dynamic or any(rule.set.dynamic for rule in config.rules)
    if config.mode == "auto" or (apart and config.mode != "dynamic"):
        cause = "the PyTorch front end trains all activations on scales of the file, or all on scales of each run"
        fix = "write `mode: static` or `mode: dynamic`, or export the float model and quantize that"
        raise ConfigError(config.where("mode"), cause, fix, code="Q307")
    for rule in config.rules:
        if rule.set.range is not None:
            cause = "the PyTorch front end finds its ranges itself"
            fix = "quantize the exported model with this rule"
            raise ConfigError(rule.describe(), cause, fix, code="Q307")
    engine = find_target(config.target, config.mode)
    # Targets are shared by all that plan for an engine, so the additions go into a copy.
    settings = list_fields(engine)
    settings["rules"] += VIRTUAL_RULES if engine.ideal else ()
    return FrontEndTarget(**settings, policies=dict(config.torch.multi_input))


class CallRequests(Requests):
    """Requests for calls: rules name modules by path, and operators in torch's words or in ONNX's."""

    def list_words(self, node: NodeRef) -> tuple[str, Names]:
        """The module's path; the operator in both."""
        # One file of rules serves the module and its export.
        call = read_call(node)
        return call.path, (call.op.name, *call.op.onnx)

    def channel_axis(self, node: NodeRef) -> int | None:
        """The axis that the operator takes as channels."""
        return read_call(node).op.channel

    def weight_axis(self, node: NodeRef, *, blocked: bool) -> int:
        """As in ONNX; operators that have no weight in ONNX name it themselves."""
        if node.op_type in ("Einsum", "torch.embedding"):
            op = read_call(node).op
            return op.block_axis if blocked else op.weight_axis
        return super().weight_axis(node, blocked=blocked)


def check_policies(config: Config) -> None:
    """Raise ConfigError for a `multi_input` that names no operator."""
    for op, _ in config.torch.multi_input:
        if op not in list_op_names():
            where = config.where("torch.multi_input")
            raise ConfigError(
                where / op, "is no operator", suggest_names(op, list_op_names()), code="Q309"
            )
