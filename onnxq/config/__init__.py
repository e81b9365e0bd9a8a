"""Configuration: YAML presets and files, read into frozen types."""

from onnxq.config.commands import DiffConfig, ProveConfig
from onnxq.config.data import DataConfig, ImageConfig, RuntimeConfig, ScaleConfig, VerifyConfig
from onnxq.config.front_end import FrontEnd, MultiInput, QuantizerSpec
from onnxq.config.load import (
    check_trust,
    list_presets,
    parse_setting,
    read_config,
    read_preset,
    write_config,
)
from onnxq.config.model import Config, Option, drop_unset, expand_names, list_code, list_options
from onnxq.config.rules import Rule, RuleSet, TensorConfig
from onnxq.config.values import (
    DEFAULT_TARGET,
    Command,
    Frozen,
    Observer,
    Scheme,
    change_fields,
    join_words,
    match_names,
    matches_any,
)
from onnxq.errors import suggest_names

__all__ = [
    "DEFAULT_TARGET",
    "Command",
    "Config",
    "DataConfig",
    "DiffConfig",
    "FrontEnd",
    "Frozen",
    "ImageConfig",
    "MultiInput",
    "Observer",
    "Option",
    "ProveConfig",
    "QuantizerSpec",
    "Rule",
    "RuleSet",
    "RuntimeConfig",
    "ScaleConfig",
    "Scheme",
    "TensorConfig",
    "VerifyConfig",
    "change_fields",
    "check_trust",
    "drop_unset",
    "expand_names",
    "join_words",
    "list_code",
    "list_options",
    "list_presets",
    "match_names",
    "matches_any",
    "parse_setting",
    "read_config",
    "read_preset",
    "suggest_names",
    "write_config",
]
