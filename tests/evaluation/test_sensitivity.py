"""Profiles: the site to blame is found, alone and by what leaving it out brings back; the command shows it."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import compose, numpy_helper

import onnxq
from onnxq.config import TensorConfig
from onnxq.config.commands import ProfileConfig
from onnxq.config.document import list_choices
from onnxq.errors import ConfigError, ModelError, PlanError
from onnxq.evaluation.accumulator import noise_to_db
from onnxq.evaluation.compare import compare_models
from onnxq.evaluation.sensitivity import KINDS, group_by_node, list_groups, split_segments
from onnxq.evaluation.toggled import Switch
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.cli.kit import run
from tests.engines.diff.models import chain, pairs
from tests.engines.diff.models import samples as rows
from tests.pipeline.models import BALANCED, EVERYTHING, ROUGH, images, quantize, residual


@pytest.fixture(scope="module")
def result() -> onnxq.Result:
    return quantize(residual(), images(), ROUGH)


@pytest.fixture(scope="module")
def profile(result: onnxq.Result) -> onnxq.Profile:
    return onnxq.profile_model(residual(), result.model, images(), overrides={"samples": 4})


def test_the_rough_site_is_found_by_every_reading(profile: onnxq.Profile) -> None:
    sites = profile.of("site")
    assert sites[0].sites == ("r",)
    assert min(sites, key=lambda one: one.isolated_db).sites == ("r",)
    assert sites[0].gain_db > 10
    assert all(abs(one.gain_db) < 1 for one in sites[1:])
    first = profile.of("node")[0]
    assert "r" in first.sites
    assert first.name in ("c/Conv", "d/Conv")
    steps = [step.sqnr_db for step in profile.prefixes]
    assert steps[0] > steps[-1] + 10


def test_figures_are_those_of_the_models_themselves(profile: onnxq.Profile, result: onnxq.Result) -> None:
    plain = Session(residual(), optimize=False)
    taken = onnxq.profile_model(residual(), result.model, images(), overrides={"samples": 16, "by": ["site"]})
    samples = [{"x": sample[None]} for sample in images()["x"]]
    found = compare_models({"": (plain, Session(result.model, optimize=False))}, samples)[""].results()
    assert taken.outputs[0].sqnr_db == pytest.approx(found[0].sqnr_db, abs=0.1)
    assert profile.outputs[0].float_db > 100
    assert profile.prefixes[-1].sqnr_db == pytest.approx(profile.sqnr_db)


def test_a_plan_and_its_model_give_the_same_as_often_as_asked(profile: onnxq.Profile, result: onnxq.Result) -> None:
    given = {"data": images(), "overrides": {"samples": 4}}
    assert onnxq.profile_model(residual(), result.model, **given).groups == profile.groups
    assert onnxq.profile_model(residual(), plan=result.plan, **given).groups == profile.groups


def test_scaled_channels_are_compared_with_the_scaled_model() -> None:
    proto = residual()
    first = next(t for t in proto.graph.initializer if t.name == "w1")
    scaled = numpy_helper.to_array(first) * np.geomspace(0.02, 50, 32).astype(np.float32)[:, None, None, None]
    first.CopyFrom(numpy_helper.from_array(scaled, "w1"))
    made = quantize(proto, images(24), BALANCED)
    found = onnxq.profile_model(proto, made.model, images(), overrides={"samples": 2, "by": ["node"]})
    assert found.outputs[0].float_db > 80
    assert found.warnings == ()


def test_segments_find_what_sites_hide() -> None:
    """Three rough sites in a row: leaving one out brings little back, leaving the segment out nearly all."""
    config = EVERYTHING.model_copy(update={"weights": TensorConfig(granularity="channel", bits=2, narrow_range=True)})
    found = onnxq.profile_model(residual(), data=images(), config=config, overrides={"samples": 4})
    segment, site = found.of("segment")[0], found.of("site")[0]
    assert segment.gain_db > site.gain_db + 2
    assert len(segment.sites) > len(site.sites)


def test_what_cannot_be_switched_is_said() -> None:
    proto = chain()
    for node in proto.graph.node:
        node.name = f"other_{node.name}"
    found = onnxq.profile_model(proto, pairs(chain()), rows())
    assert len(found.fixed) == 3
    assert any("could not be switched off" in line for line in found.warnings)


def test_a_plan_without_numbers_and_one_beside_a_model_are_refused(result: onnxq.Result) -> None:
    plan = onnxq.make_plan(residual(), images(), EVERYTHING)
    with pytest.raises(PlanError, match="no numbers"):
        onnxq.profile_model(residual(), plan=plan, data=images())
    with pytest.raises(ConfigError, match="give one"):
        onnxq.profile_model(residual(), result.model, images(), plan=result.plan)
    with pytest.raises(ModelError, match="inputs: the models do not have the same ones: other_x, x"):
        onnxq.profile_model(residual(), compose.add_prefix(result.model, "other_"), images())


@pytest.fixture
def work(tmp_path: Path, result: onnxq.Result) -> Path:
    onnx.save(residual(), tmp_path / "m.onnx")
    result.save(tmp_path / "q.onnx")
    (tmp_path / "p.json").write_text(result.plan_json())
    np.savez(tmp_path / "d.npz", **images())
    return tmp_path


def test_the_command(work: Path) -> None:
    shown = run("profile", work / "m.onnx", work / "q.onnx", "--data", work / "d.npz", "--samples", 2)
    assert shown.exit_code == 0, shown.stderr
    for text in ("nodes, each with all it reads", "segments", "sites", "prefixes", "gain"):
        assert text in shown.stdout
    one = run("profile", work / "m.onnx", "--plan", work / "p.json", "--data", work / "d.npz", "--by", "site", "--json")
    document = json.loads(one.stdout)
    assert document["groups"][0]["name"] == "r"
    assert document["samples"] == 8
    assert math.isclose(document["sqnr_db"], document["outputs"][0]["sqnr_db"], rel_tol=1e-6)


def test_the_command_quantizes_by_itself_and_warns_of_made_up_inputs(work: Path) -> None:
    shown = run("profile", work / "m.onnx", "--samples", 2, "--by", "node")
    assert shown.exit_code == 0, shown.stderr
    assert "made-up inputs" in shown.stdout


def test_every_grouping_is_offered() -> None:
    assert tuple(list_choices(ProfileConfig.model_fields["by"].annotation)) == KINDS


def switch(site: str, *readers: str, weight: bool = False) -> Switch:
    return Switch(site, Role.WEIGHT if weight else Role.ACTIVATION, readers, ("Conv",), f"feed/{site}")


def row(count: int) -> list[Switch]:
    """A chain of nodes n0, n1 …: each reads an activation and a weight, the last one an activation alone."""
    return [
        one
        for k in range(count)
        for one in (switch(f"t{k}", f"n{k}"), *([switch(f"w{k}", f"n{k}", weight=True)] if k < count - 1 else []))
    ]


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]))
@settings(max_examples=25)
def test_segments_cover_the_network_once_with_two_weights_at_least(count: int, parts: int) -> None:
    nodes = group_by_node(row(count))
    found = split_segments(nodes, parts)
    weights = count - 1
    assert bool(found) is (weights > parts)
    if not found:
        return
    assert len(found) <= parts
    members = [one for segment in found for one in segment.switches]
    assert members == [one for held in nodes.values() for one in held]
    sizes = [sum(one.role is Role.WEIGHT for one in segment.switches) for segment in found]
    assert min(sizes[:-1]) == max(sizes[:-1]) >= 2
    assert sizes[-1] <= sizes[0]
    assert found[0].name == f"n0 … n{sizes[0] - 1}"


def test_groups_that_hold_the_same_switches_are_measured_once() -> None:
    shared = switch("t", "a", "b")
    switches = [shared, switch("w", "a", weight=True), switch("s", "c")]
    found = {(one.kind, one.name): {s.site for s in one.switches} for one in list_groups(switches)}
    assert found == {
        ("node", "a"): {"t", "w"}, ("node", "b"): {"t"}, ("node", "c"): {"s"}, ("site", "w"): {"w"},
    }  # fmt: skip
    assert {one.name for one in list_groups(switches, ["site"])} == {"t", "w", "s"}
    assert list_groups((), KINDS) == ()


def test_activations_alone_are_cut_into_segments_by_nodes() -> None:
    nodes = group_by_node([switch(f"t{k}", f"n{k}") for k in range(6)])
    assert [one.name for one in split_segments(nodes, 2)] == ["n0 … n2", "n3 … n5"]
    assert split_segments(nodes, 6) == []


@pytest.mark.parametrize(
    ("noise", "db"),
    [(1.0, 0.0), (0.01, 20.0), (100.0, -20.0), (0.0, math.inf), (math.inf, -math.inf), (math.nan, -math.inf)],
)
def test_noise_in_decibels(noise: float, db: float) -> None:
    assert noise_to_db(noise) == pytest.approx(db)
