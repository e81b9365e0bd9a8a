"""Two models compared a segment at a time: segments carry all that ORT needs to run them."""

from __future__ import annotations

import math

from hypothesis import given, settings

from onnxq.evaluation.segments import compare_segments
from tests.graph.shape_nets import ShapeNet, shape_nets


@settings(max_examples=15, deadline=None)
@given(shape_nets())
def test_segments_carry_sizes_ranks_and_sequences(net: ShapeNet) -> None:
    model = net.model()
    found = compare_segments(model, model, net.feeds((8, 8), (6, 11)), limit=1)
    assert min(errors.off.worst_db() for errors in found) == math.inf
    assert min(errors.on.worst_db() for errors in found) > 90
