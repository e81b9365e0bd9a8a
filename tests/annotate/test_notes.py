"""Annotate reads all that onnxq writes: from the notes, and without them from the graph itself."""

from functools import cache

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.annotate import Origin, find_pairs
from onnxq.sites import Role
from tests.annotate import models


@cache
def quantized(bits: int, weights: int, storage: str = "int8") -> onnxq.Result:
    rules = [
        {"role": "activation", "op": "*", "set": {"bits": bits, "quantize": True}},
        {"role": "weight", "op": "*", "set": {"bits": weights, "storage": storage, "quantize": True}},
    ]
    samples = [{"x": np.random.default_rng(k).normal(size=(1, 4, 8, 8)).astype(np.float32)} for k in range(4)]
    return onnxq.quantize(models.float_conv(), samples, overrides={"rules": rules, "latency": False})


def forget(proto: onnx.ModelProto) -> onnx.ModelProto:
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.metadata_props[:]
    for node in bare.graph.node:
        del node.metadata_props[:]
    return bare


@pytest.mark.parametrize(("bits", "weights"), [(8, 8), (4, 8), (8, 4), (5, 3)])
def test_sites_bits_and_schemes_are_those_of_the_plan_and_the_graph_alone_says_nearly_as_much(bits, weights):
    made = quantized(bits, weights)
    assert made.plan.sites
    found, bare = ({pair.site: pair for pair in find_pairs(one)} for one in (made.model, forget(made.model)))
    assert set(found) == set(bare) == {site.site for site in made.plan.sites}
    for site in made.plan.sites:
        pair = found[site.site]
        seen = (pair.bits, pair.symmetric, pair.storage, pair.granularity, pair.role)
        assert seen == (site.spec.bits, site.spec.symmetric, site.spec.storage, site.spec.granularity, site.role)
        assert pair.origin is Origin.METADATA
        assert bare[site.site].bits == site.spec.bits, site.site
    origins = {str(pair.role): pair.origin for pair in bare.values()}
    assert origins["activation"] is (Origin.TYPE if bits == 8 else Origin.CLIP)
    assert origins["weight"] is (Origin.TYPE if weights == 8 else Origin.VALUES)


def test_the_plan_alone_is_enough():
    made = quantized(4, 8)
    bare = forget(made.model)
    bare.metadata_props.extend(entry for entry in made.model.metadata_props if entry.key == "onnxq.plan")
    found = find_pairs(bare)
    assert {pair.origin for pair in found} == {Origin.PLAN}
    assert {pair.site: pair.bits for pair in found} == {site.site: site.spec.bits for site in made.plan.sites}


def test_packed_weights_are_read_as_what_the_file_holds():
    made = quantized(8, 4, "int4")
    for model, origin in ((made.model, Origin.METADATA), (forget(made.model), Origin.TYPE)):
        weights = [pair for pair in find_pairs(model) if pair.role is Role.WEIGHT]
        assert [(p.bits, p.storage, p.origin, p.clip) for p in weights] == [(4, "int4", origin, "")] * len(weights)
        assert {pair.site for pair in weights} == {site.site for site in made.plan.sites if site.role is Role.WEIGHT}
