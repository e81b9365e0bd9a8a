"""What a call is asked for: configuration and overrides together, its target, its outputs."""

from pathlib import Path

import onnx
import pytest
from threadpoolctl import ThreadpoolController

from onnxq.backends import BACKENDS, Backend, find_target, load_config
from onnxq.config import Command, Config
from onnxq.errors import ConfigError, OutputError
from onnxq.files import register_input
from onnxq.pipeline.configuration import make_config, open_run
from tests.networks import parse_text


@pytest.mark.parametrize(
    ("config", "overrides", "source"),
    [
        (None, None, "ort-int8"),
        (None, {"target": "trt"}, "trt-int8"),
        (None, {"target": None}, "ort-int8"),
        ("trt-fp8", {"target": "trt"}, "trt-fp8"),
        (Config(), {"seed": 3}, ""),
    ],
)
def test_the_preset_follows_the_target(config: object, overrides: dict[str, object] | None, source: str) -> None:
    assert make_config(config, overrides, Command.QUANTIZE).source == source  # type: ignore[arg-type]


def test_options_stand_above_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: {samples: 8, seed: 1}\nruntime: {libraries: a.so}\n")
    given = {"samples": 3, "seed": None, "ort_library": "b.so", "data.batch": 2}
    with pytest.raises(ConfigError, match="names code"):
        make_config(path, given, Command.QUANTIZE)
    config = make_config(path, {**given, "trust": path}, Command.QUANTIZE)
    assert (config.data.samples, config.data.seed, config.data.batch) == (3, 1, 2)
    assert config.runtime.libraries == ("b.so", str(tmp_path / "a.so"))
    # Places of the file are still known, those of overrides say so.
    assert str(config.where("data.seed")) == f"{path}:1: data.seed"
    assert str(config.where("data.samples")) == "option: data.samples"


def test_a_file_without_a_target_is_for_that_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("effort: fast\n")
    config = make_config(path, {"target": "trt"}, Command.QUANTIZE)
    assert (config.target, config.effort, config.source) == ("trt", "fast", str(path))
    assert config.activations == load_config("trt-int8").activations


def test_a_configuration_for_another_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("target: virtual\n")
    with pytest.raises(ConfigError, match=r"target 'trt': the configuration '.*c.yaml' is for 'virtual'"):
        make_config(path, {"target": "trt"}, Command.QUANTIZE)
    with pytest.raises(ConfigError, match="target 'trt': the configuration 'ort-int8' is for 'ort'"):
        make_config("ort-int8", {"target": "trt"}, Command.PLAN)


def test_an_unknown_target_is_named_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("mode: static\ntarget: trrt\n")
    with pytest.raises(ConfigError) as caught:
        make_config(path, None, Command.QUANTIZE)
    assert (caught.value.code, caught.value.file, caught.value.line) == ("Q312", str(path), 2)
    assert caught.value.subject == f"{path}:2: target"
    assert caught.value.fix == "did you mean 'trt'?"


def test_a_registered_target_goes_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = Backend(name="mine", modes={"static": find_target("virtual")})
    monkeypatch.setitem(BACKENDS, "mine", mine)
    assert make_config(None, {"target": "mine"}, Command.QUANTIZE).target == "mine"
    with pytest.raises(ConfigError) as caught:
        make_config(load_config("ort-int8-weights", {"target": "mine"}), None, Command.QUANTIZE)
    assert "has no mode 'weight-only'" in caught.value.cause
    assert "static" in caught.value.fix


def test_names_in_the_configuration_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"skip\[0\]: no pass is called 'roundign'(.|\n)*'rounding'"):
        make_config(None, {"skip": ["roundign"]}, Command.QUANTIZE)
    with pytest.raises(ConfigError, match=r"activations\.observer: observer 'percentile': percentile=200"):
        make_config(None, {"activations.observer": {"name": "percentile", "percentile": 200}}, Command.PLAN)
    with pytest.raises(ConfigError, match="cannot be 4 on average"):
        make_config(None, {"weight_bits_budget": 4}, Command.QUANTIZE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(parse_text("g (float[1] x) => (float[1] y) { y = Neg(x) }"), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("command", "overrides", "said"),
    [
        (Command.QUANTIZE, {"plan_out": "there.json"}, "there.json: exists"),
        (Command.QUANTIZE, {"plan_out": "m.q.onnx"}, "asked for twice"),
        (Command.QUANTIZE, {"plan_out": "c.yaml"}, "is an input of this command"),
        (Command.ANNOTATE, {"external_data": True}, "m.q.onnx_data: exists"),
    ],
)
def test_outputs_are_found_wanting_before_the_work(
    model: Path, monkeypatch: pytest.MonkeyPatch, command: Command, overrides: dict[str, object], said: str
) -> None:
    folder = model.parent
    monkeypatch.chdir(folder)
    (folder / "there.json").touch()
    (folder / "m.q.onnx_data").touch()
    (folder / "c.yaml").write_text("effort: fast\n")
    force = said == "is an input of this command"
    with (
        pytest.raises(OutputError, match=said),
        open_run(model, "c.yaml", overrides, command, out="m.q.onnx", force=force),
    ):
        raise AssertionError("it has begun")


def test_files_of_other_commands_are_no_outputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    Path("plan.json").touch()
    Path("c.yaml").write_text("output: {plan: plan.json, external_data: true}\n")
    Path("p.json.data").touch()
    with open_run(model, "c.yaml", None, Command.PLAN, out="p.json") as config:
        assert config.output.plan == "plan.json"
        register_input("plan.json")


def test_an_input_that_is_an_output_is_refused_as_soon_as_it_is_read(model: Path) -> None:
    out = model.parent / "out.onnx"
    out.touch()
    with (
        open_run(model, None, None, Command.QUANTIZE, out=out, force=True),
        pytest.raises(OutputError, match="is read"),
    ):
        register_input(out)


def test_products_of_a_run_take_one_thread(tmp_path: Path) -> None:
    onnx.save(parse_text("g (float[1] x) => (float[1] y) { y = Relu(x) }"), tmp_path / "m.onnx")
    blas = ThreadpoolController().select(user_api="blas")
    with blas.limit(limits=2):
        usual = blas.info()
        with open_run(tmp_path / "m.onnx", None, None, Command.DIFF):
            assert {library["num_threads"] for library in blas.info()} <= {1}
        assert blas.info() == usual
