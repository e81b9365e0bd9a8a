"""Names of Sparsebit's quantizers, so that its users' code runs; each warns once where it is called."""

from __future__ import annotations

import warnings
from dataclasses import replace

from onnxq.spec import QuantSpec
from torch_frontend.quantizers import limits


def warn_renamed(old: str, new: str) -> None:
    """DeprecationWarning of the caller's caller."""
    warnings.warn(f"`{old}` is Sparsebit's name: write `{new}`", DeprecationWarning, stacklevel=3)


class AncestorQuantizer:
    """The switches of a quantizer under Sparsebit's names."""

    enabled: bool
    spec: QuantSpec
    site: str
    target: str

    def set_bit(self, bit: int) -> None:
        """Quantize to other bits, before there are scales. Raises ConfigError for bits that the target lacks."""
        spec = replace(self.spec, bits=bit)
        limits.check_spec(spec, self.site, self.target)
        self.spec = spec

    def enable_quant(self) -> None:
        """Set `enabled`."""
        warn_renamed("enable_quant()", "enabled = True")
        self.enabled = True

    def disable_quant(self) -> None:
        """Clear `enabled`."""
        warn_renamed("disable_quant()", "enabled = False")
        self.enabled = False
