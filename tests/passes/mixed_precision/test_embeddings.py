"""Tables of embeddings judged by the outputs, and known to the commands that read quantized models."""

import re

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.annotate import annotate_model, find_pairs
from onnxq.passes.judging import add_noises
from onnxq.spec import PerBlock, PerChannel
from tests.tables import make_table, model, quantize, tokens, words


def loses_much() -> onnx.ModelProto:
    """The difference of two nearly equal rows, whose errors are as large as it is."""
    table = make_table()
    table[1::2] = table[::2] + 0.01 * np.abs(make_table(150, seed=3))
    body = "e = Gather(w, ids) o = Add(ids, one) f = Gather(w, o) d = Sub(f, e) y = Mul(d, d)"
    return model(body, w=table, one=np.array(1))


def even_tokens() -> dict[str, np.ndarray]:
    return {"ids": 2 * np.random.default_rng(1).integers(0, 149, (24, 1, 7))}


def test_tables_that_cost_the_outputs_too_much_stay_float() -> None:
    made = quantize(loses_much(), even_tokens())
    assert not made.plan.sites
    (left,) = (one for one in made.report.left_float if one.code == "F109")
    assert "cost too much" in left.reason
    assert any(line.startswith("embeddings: rolled back") for line in made.report.accounts)


def test_their_noise_is_judged_alone_and_added_to_that_of_the_rest() -> None:
    # With the rest, a handful of samples shows chance instead: the outputs may even come nearer.
    rules = [{"op": "MatMul", "role": "weight", "set": {"bits": 4}}, {"op": "MatMul", "set": {"quantize": True}}]
    proto = model("e = Gather(w, ids) y = MatMul(e, m)", w=make_table(), m=make_table(48, 48, seed=5))
    for seed in range(3):
        ids = {"ids": np.random.default_rng(seed).integers(0, 300, (8, 1, 1))}
        (told,) = (line for line in quantize(proto, ids, rules=rules).report.accounts if line.startswith("embeddings"))
        before, after = re.findall(r"(\S+) to (\S+) dB in a trial", told)[0]
        assert 0 <= float(before) - float(after) < 0.2


@pytest.mark.parametrize(
    ("one", "other", "both"), [(20, 20, 16.99), (20, 40, 19.957), (20, np.inf, 20), (np.inf, np.inf, np.inf)]
)
def test_noises_add_up(one: float, other: float, both: float) -> None:
    assert add_noises(one, other) == pytest.approx(both, abs=0.001)


def test_tables_that_were_asked_for_are_not_judged() -> None:
    named = [{"tensor": "w", "set": {"quantize": True}}]
    assert quantize(loses_much(), even_tokens(), embeddings="int8").plan.sites
    assert quantize(loses_much(), even_tokens(), rules=named).plan.sites


def test_without_samples_the_error_of_the_rows_decides() -> None:
    assert onnxq.quantize(loses_much(), None, overrides={"effort": "fast", "latency": False}).plan.sites


def test_a_table_that_stands_in_the_way_of_an_asked_accuracy_stays_float() -> None:
    assert quantize(words()).plan.sites
    assert quantize(words(), min_sqnr=35).plan.sites
    assert not quantize(words(), min_sqnr=60).plan.sites


def test_the_summary_says_what_is_saved_and_skip_leaves_it_out() -> None:
    made = quantize(words())
    assert "embeddings: 1 table, 57,600 bytes in 14,400" in [line.split(", 4")[0] for line in made.report.accounts]
    assert made.report.output_bytes < made.report.source_bytes / 2
    assert not quantize(words(), skip=["embeddings"]).plan.sites


@pytest.mark.parametrize(("wish", "bits", "grain"), [("int8", 8, PerChannel(0)), ("int4", 4, PerBlock(1, 32))])
def test_other_commands_know_tables(wish: str, bits: int, grain: object) -> None:
    float_model = words()
    proto = quantize(float_model, embeddings=wish).model
    (pair,) = find_pairs(proto)
    assert (str(pair.site), pair.bits, pair.granularity, pair.ops) == ("w", bits, grain, ("Gather",))
    assert pair.lookup == "e/Gather"
    bare = onnx.ModelProto.FromString(proto.SerializeToString())
    del bare.metadata_props[:]
    for node in bare.graph.node:
        del node.metadata_props[:]
    (found,) = find_pairs(bare)
    assert (str(found.site), found.bits, found.granularity) == ("w", bits, grain)
    noted = annotate_model(proto, rename=True)
    assert [node.name for node in noted.model.graph.node] == [node.name for node in proto.graph.node]
    assert {group.name for group in onnxq.profile_model(float_model, proto, tokens()).groups} == {"e/Gather"}


@pytest.mark.usefixtures("engines_here")
def test_prove_sees_the_table_read_in_integers() -> None:
    (site,) = onnxq.prove(quantize(words(), embeddings="int8").model, overrides={"engine": "ort"}).sites
    assert (site.site, str(site.state), site.readers) == ("w", "fused", ("e/Gather",))


def test_a_model_with_tables_is_quantized_further_around_them() -> None:
    body = "e = Gather(w, ids) h = Relu(e) y = MatMul(h, m)"
    proto = model(body, w=make_table(), m=make_table(48, 600, seed=5))
    rows = quantize(proto, embeddings="int8", rules=[{"op": "MatMul", "set": {"float": True}}]).model
    again = quantize(rows, rules=[{"op": "MatMul", "set": {"quantize": True}}])
    assert "w/quantized" in {tensor.name for tensor in again.model.graph.initializer}
    assert {str(site.site) for site in again.plan.sites} >= {"m", "h"}
