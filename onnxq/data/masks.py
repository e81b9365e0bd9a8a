"""Positions of a sample that count, by the model's own mask input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_mask(feeds: Mapping[str, NDArray[Any]], shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Read the mask [batch, positions] of values of this shape from the model's own mask input; None: all count.

    The network computes values for padding, too, and no output depends on them. In samples with much padding they would
    outweigh the text.
    """
    masks = [value for name, value in feeds.items() if "mask" in name.lower() and value.dtype.kind in "iub"]
    if len(masks) != 1 or masks[0].ndim != 2 or shape[:2] != masks[0].shape or len(shape) != 3:
        return None
    mask = masks[0] != 0
    # Other values than 0 and 1 make it something else, e.g. an additive mask; a mask without ones hides everything.
    return mask if bool(np.isin(masks[0], (0, 1)).all()) and bool(mask.any()) else None
