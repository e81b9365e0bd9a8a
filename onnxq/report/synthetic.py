"""The warnings about made-up inputs."""

from __future__ import annotations

from onnxq.sites import Caution

# In plans and, as a banner, in summaries.
SYNTHETIC = Caution(
    "W101",
    "SYNTHETIC DATA: no samples were given; ranges that come from random inputs make answers nobody can trust. "
    "Pass real samples as `data=…`.",
)


def warn_synthetic(done: str) -> Caution:
    """Make the warning for figures from made-up inputs. done: "costs were measured"."""
    return Caution("W101", f"no samples were given: {done} on made-up inputs, so give `data=…` for numbers that count")
