"""Names of Sparsebit's quantizers, so that its users' code runs; each warns once where it is called."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str) -> None:
    """DeprecationWarning of the caller's caller."""
    warnings.warn(f"`{old}` is Sparsebit's name: write `{new}`", DeprecationWarning, stacklevel=3)


class AncestorQuantizer:
    """The switches of a quantizer under Sparsebit's names."""

    enabled: bool

    def enable_quant(self) -> None:
        """Set `enabled`."""
        warn_renamed("enable_quant()", "enabled = True")
        self.enabled = True

    def disable_quant(self) -> None:
        """Clear `enabled`."""
        warn_renamed("disable_quant()", "enabled = False")
        self.enabled = False
