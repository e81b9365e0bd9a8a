"""Configuration: YAML presets and files, read into frozen types."""

from onnxq.config.data import DataConfig, ImageConfig, RuntimeConfig, VerifyConfig
from onnxq.config.front_end import FrontEnd, MultiInput, QuantizerSpec, Trained
from onnxq.config.limits import check_limits
from onnxq.config.load import load_config
from onnxq.config.model import Config
from onnxq.config.options import check_number, set_options
from onnxq.config.presets import preset_names, preset_text
from onnxq.config.rules import QuantWish, Rule, RuleSet
from onnxq.config.values import Frozen, Observer, Scheme, matches
from onnxq.nearest import did_you_mean, nearest

__all__ = [
    "Config",
    "DataConfig",
    "FrontEnd",
    "Frozen",
    "ImageConfig",
    "MultiInput",
    "Observer",
    "QuantWish",
    "QuantizerSpec",
    "Rule",
    "RuleSet",
    "RuntimeConfig",
    "Scheme",
    "Trained",
    "VerifyConfig",
    "check_limits",
    "check_number",
    "did_you_mean",
    "load_config",
    "matches",
    "nearest",
    "preset_names",
    "preset_text",
    "set_options",
]
