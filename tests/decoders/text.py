"""The text that the tiny decoder knows by heart, as tokens: printable ASCII."""

import numpy as np
from numpy.typing import NDArray

FIRST, VOCABULARY = 32, 96

TEXT = (
    "A plan says what is quantized, how, where, by which rule and why. The planner asks the target for the rule of "
    "every operator, meets the rules of the person, and chooses. The float model runs once over the samples, and "
    "observers give ranges, of which scales are made. Passes refine the plan: weights are rounded by second moments, "
    "and operators are left float where that is asked for. Then the pairs are written, and the result is checked "
    "against the float model on samples that nothing was chosen on. A range that is too wide wastes levels, one that "
    "is too narrow clips; both are noise, and the best of them is the one whose readers notice least. A weight is "
    "known before the first sample comes, so that its scale may follow each channel. An activation is not: it has "
    "one scale, and a few large values in it cost all the others their digits. "
)


def encode_text(text: str = TEXT) -> NDArray[np.int64]:
    """Token ids of shape [1, letters]."""
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64)[None] - FIRST


def decode_tokens(tokens: NDArray[np.int64]) -> str:
    return bytes((np.ravel(tokens) + FIRST).astype(np.uint8)).decode("ascii")
