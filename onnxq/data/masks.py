"""Which positions of a sample count, by the model's own mask input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def attended(feeds: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Where values of this shape count, [batch, positions], by the model's own mask input; None where all do.

    Padding gets values too, which nobody reads. They would outweigh the text where samples are padded far.
    """
    masks = [value for name, value in feeds.items() if "mask" in name.lower() and value.dtype.kind in "iub"]
    if len(masks) != 1 or masks[0].ndim != 2 or shape[:2] != masks[0].shape or len(shape) != 3:
        return None
    meant = masks[0] != 0
    return meant if bool(np.isin(masks[0], (0, 1)).all()) and bool(meant.any()) else None
