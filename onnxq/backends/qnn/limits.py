"""Values of a configuration that no kernel of the NPU supports."""

from onnxq.backends.registry import NO_CPU_KINDS, NO_OPERATORS, OBSERVER, Limit, has_positive_scales

LIMITS = (
    Limit(
        "mode",
        lambda c: c.mode in ("static", "float"),
        "the NPU computes whole graphs in integers, on scales that stand in the file",
        "write `mode: static` and give samples",
    ),
    Limit(
        "activations.granularity",
        lambda c: c.activations.granularity == "tensor",
        "the NPU's activations have one scale a tensor",
        "write `granularity: tensor`",
    ),
    Limit(
        "activations.scheme",
        lambda c: c.activations.scheme == "asymmetric",
        "a zero point takes up the Relu or Clip behind an operator, which would run in float without it",
        "write `scheme: asymmetric`",
    ),
    Limit(
        "bias",
        lambda c: c.bias == "int32",
        "an operator with a float bias does not run on the NPU",
        "write `bias: int32`",
    ),
    Limit(
        "token_scales",
        lambda c: not c.token_scales,
        "the NPU computes whole graphs in integers, scales of tokens too",
        "remove it; 16-bit activations, as in qnn-a16w8, keep tokens of all sizes",
    ),
    Limit(
        "placement",
        lambda c: c.placement == "rules",
        "an emulated NPU has no times to measure",
        "write `placement: rules`",
    ),
    Limit(OBSERVER, has_positive_scales, "the NPU reads positive scales", "remove `signed_scales`"),
    NO_CPU_KINDS,
    NO_OPERATORS,
)
