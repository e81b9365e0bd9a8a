"""The configuration: frozen, hashable, without arrays. Strings of the YAML become types here and go no further.

It states a request for each kind of tensor; the target answers with a spec or a Refusal. Fields made by `option` are
options of commands and of Python functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BeforeValidator, ConfigDict, PrivateAttr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from onnxq.config.commands import (
    AccuracyConfig,
    ApplyConfig,
    BenchConfig,
    ConvertConfig,
    DiffConfig,
    PerplexityConfig,
    ProfileConfig,
    ProveConfig,
    ReportConfig,
    SearchConfig,
    VariantsConfig,
)
from onnxq.config.data import DataConfig, OutputConfig, RuntimeConfig, ScaleConfig, VerifyConfig
from onnxq.config.document import Path, format_path, list_choices, list_faults, list_models
from onnxq.config.front_end import FrontEnd
from onnxq.config.rules import Rule, TensorConfig
from onnxq.config.values import (
    DEFAULT_TARGET,
    MAKING,
    Bits,
    Command,
    Files,
    HighPrecision,
    Seconds,
    Section,
    Words,
    change_fields,
    join_words,
    option,
    wrap_single,
)
from onnxq.errors import ConfigError, Location, suggest_names
from onnxq.sites import JsonObject, Names, Settings

_T = TypeVar("_T")


_PLANNING = MAKING | Command.PLAN
_CONVERTING = _PLANNING | Command.CONVERT
_EMITTING = _CONVERTING | Command.IMPORT_WEIGHTS


class Config(Section):
    """The whole configuration. The defaults are those of the preset `ort-int8`.

    A field made by `option` is given to commands and Python functions, too, under its own name.
    """

    # The preset or file it was read from; "" if made in Python.
    source: str = ""
    # Never from a file, which could trust itself.
    trust: Files = option(
        (),
        "A configuration file that may run the code that it names (libraries, metrics); repeatable.",
        ~Command(0),
        metavar="FILE.yaml",
    )
    # A name of `onnxq.backends`, which knows whether there is one of this name.
    target: Annotated[str, BeforeValidator(join_words)] = option(
        DEFAULT_TARGET,
        "The engine that will run the result: OpenVINO, ONNX Runtime on the CPU, Snapdragon's NPU, TensorRT, none, "
        "browsers, or that of another package. Or several that share one file, as NAME,NAME; with weights, "
        "NAME=2,NAME=1, where one matters more.",
        _PLANNING | Command.PROFILE | Command.REPORT | Command.IMPORT | Command.IMPORT_WEIGHTS,
        metavar="TARGET",
        names="backends",
    )
    # "dynamic": activations on scales of each run; "auto": some of them, as samples say. "float": nothing is quantized,
    # only float types are chosen.
    mode: Literal["static", "dynamic", "auto", "weight-only", "float"] = "static"
    activations: TensorConfig = TensorConfig(scheme="asymmetric", signed=False)
    weights: TensorConfig = TensorConfig(signed=True, granularity="channel")
    bias: Literal["int32", "float"] = "int32"
    # Whether weights may overflow 16-bit sums in kernels of CPUs without VNNI. "avoid" costs about 0.2 dB.
    saturation: Literal["avoid", "allow"] = "avoid"
    token_scales: bool = option(
        False,
        "Divide each token by a scale of its own in front of MatMul and Gemm, and multiply behind: accuracy for "
        "transformers without ranges from samples, for a tenth of the time.",
        _PLANNING,
    )
    placement: Literal["rules", "measured"] = option(
        "rules",
        "rules gives the same graph on every machine; measured times a few placements on this machine and takes the "
        "fastest.",
        _PLANNING,
    )
    cpu: Literal["any", "vnni", "avx2"] = option(
        "any",
        "The x86 CPUs that pairs are placed for: with VNNI, without VNNI (avx2), or one graph for both.",
        _PLANNING | Command.VARIANTS,
    )
    # The products of activations in attention, for engines with a fused kernel; "auto" tries both.
    attention: Literal["float", "quantized", "auto"] = "float"
    # Constants that Gather looks rows up in: int8 with one scale a row, or 4 bits in blocks of a row.
    embeddings: Literal["auto", "int8", "int4", "float"] = option(
        "auto",
        "The type that embedding tables are stored in. auto takes int8 in mode weight-only, or where they "
        "are most of the file, if the outputs stay accurate.",
        _PLANNING | Command.VARIANTS,
    )
    projection_bits: Bits | None = option(
        None,
        "Bits of weights that compute an output of the model, such as the scores of a vocabulary, in weight-only "
        "quantization. [default: the bits of all weights]",
        _PLANNING,
    )
    emit: Literal["qdq", "nbits", "qoperator"] = option(
        "qdq",
        "The form of the file. qdq: Q/DQ pairs; for ONNX Runtime alone, nbits: MatMulNBits for block-wise weights; "
        "qoperator: QLinearConv, QGemm … in the place of 8-bit pairs.",
        _EMITTING,
    )
    # 0: as the engine likes, which is float32 on the CPU; 1: float32; 4: data rounded to int8 in blocks.
    accuracy_level: Literal[0, 1, 2, 3, 4] = option(
        0,
        "How MatMulNBits computes. 0: the engine chooses; 1: float32; 2: float16; 3: bfloat16; 4: int8, faster for "
        "few tokens at a time.",
        _EMITTING,
    )
    # None: the target's; bfloat16 in place of float16 for a model that came in it.
    high_precision: HighPrecision | None = option(
        None,
        "The float type of operators that are not quantized. [default: float16 for TensorRT, else float32]",
        _CONVERTING,
    )
    io_types: HighPrecision | None = option(
        None,
        "The type of float inputs and outputs of the model. [default: their own]",
        _CONVERTING,
    )
    fix: Words = option(
        (),
        "A size of the inputs to fix, by its symbol (batch=1) or by input (x=1x3x48x320); repeatable. A target that "
        "compiles for fixed sizes takes the others from the samples.",
        _CONVERTING,
        metavar="NAME=SIZE",
    )
    effort: Literal["fast", "balanced", "high"] = option(
        "balanced",
        "Time spent on accuracy. fast: observe ranges, and choose bits where the configuration leaves them open; "
        "balanced: also equalize channels and optimize weight rounding; high: also absorb biases, with more samples "
        "and a longer search.",
        MAKING | Command.VARIANTS,
    )
    # Passes get a share of it, or are left out.
    budget: Seconds | None = option(
        None,
        "Wall-clock limit, in seconds or as 90s, 10m, 1.5h; passes are shortened to meet it.",
        Command.QUANTIZE,
        metavar="TIME",
    )
    # On average over their elements.
    weight_bits_budget: float | None = option(
        None,
        "Average bits per weight element, 2 to 16; the most sensitive weights get more bits than configured.",
        Command.QUANTIZE,
        metavar="BITS",
        ge=2,
        le=16,
    )
    # The widths to choose from for that; () for all.
    weight_bits: Annotated[tuple[Bits, ...], BeforeValidator(wrap_single)] = ()
    # Bits of activations to choose from, operator by operator; () for those of `activations` everywhere.
    activation_bits: Annotated[tuple[Bits, ...], BeforeValidator(wrap_single)] = ()
    # Names of passes to leave out.
    skip: Words = ()
    rules: tuple[Rule, ...] = ()
    accuracy: AccuracyConfig = AccuracyConfig()
    # Of one command each.
    apply: ApplyConfig = ApplyConfig()
    diff: DiffConfig = DiffConfig()
    prove: ProveConfig = ProveConfig()
    profile: ProfileConfig = ProfileConfig()
    report: ReportConfig = ReportConfig()
    search: SearchConfig = SearchConfig()
    bench: BenchConfig = BenchConfig()
    convert: ConvertConfig = ConvertConfig()
    variants: VariantsConfig = VariantsConfig()
    perplexity: PerplexityConfig = PerplexityConfig()
    data: DataConfig = DataConfig()
    verify: VerifyConfig = VerifyConfig()
    scale: ScaleConfig = ScaleConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    output: OutputConfig = OutputConfig()
    # For the torch front end only.
    torch: FrontEnd = FrontEnd()
    # Position of each path that was written, and in files of (*path, value) of the code they name. Private, so that
    # dumps leave it out.
    _places: dict[Path, Location] = PrivateAttr(default_factory=dict)

    def find_place(self, path: str) -> Location | None:
        """Find where a dotted path such as "activations.observer" was written; None if it was not."""
        return next(
            (place for parts, place in self._places.items() if format_path(parts) == path), None
        )

    def find_code(self, path: str, code: str) -> Location | None:
        """Find where a file names code for a dotted path; None if no file does."""
        return self._places.get((*path.split("."), code))

    def add_rules(self, *rules: Rule) -> Config:
        """The configuration with rules in front of its own."""
        return change_fields(self, rules=(*rules, *self.rules))

    def where(self, path: str) -> Location:
        """`file:line: path` of a dotted path; the path alone if it was not written."""
        return (self.find_place(path) or Location("")) / path

    def locate_error(self, path: str, error: ConfigError) -> ConfigError:
        """The error about a value, with the place where it was written. path: dotted."""
        return ConfigError(self.where(path), error.fault, error.fix, code=error.code)


@dataclass(frozen=True, eq=False)
class Option:
    """One option.

    path: of its field, dotted. name: for overrides. flags: of the command line. bare: its value where its flag stands
    alone; "" where it must have one. runs_code: its value names code that is run. names: the registry that lists its
    values; "" for none.
    """

    path: str
    name: str
    flags: Names
    metavar: str
    commands: Command
    field: FieldInfo
    bare: str
    runs_code: bool
    names: str

    @property
    def choices(self) -> tuple[str | int, ...]:
        """The words or numbers that its value is one of; () for other values."""
        return () if self.metavar else tuple(list_choices(self.field.annotation))

    @property
    def repeatable(self) -> bool:
        """True for any number of values, each with a flag of its own."""
        return (
            self.field.default == () and not self.names and not list_choices(self.field.annotation)
        )

    @property
    def is_whole(self) -> bool:
        """True for a whole number."""
        return int in (self.field.annotation, *get_args(self.field.annotation))

    @property
    def bounds(self) -> tuple[Any, Any]:
        """The least and the greatest value; None for no bound."""
        bounds = {"ge": None, "le": None}
        for limit in self.field.metadata:
            for end in bounds:
                bounds[end] = getattr(limit, end, bounds[end])
        return bounds["ge"], bounds["le"]

    @property
    def help(self) -> str:
        """Its meaning and its default."""
        text = str(self.field.description)
        default = self.field.default
        if isinstance(default, bool) or default in (None, "", ()):
            return text
        value = f"{default:g}" if isinstance(default, float) else default
        return f"{text} [default: {value}]"

    def parse(self, text: str) -> Any:
        """Convert the text of a command line. Raises ValueError, in words for people, for one that does not fit."""
        kind: Any = Annotated[(self.field.annotation, self.field)]
        # float() reads nan and inf as well, which say nothing as an option.
        adapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            fault = list_faults(error, Config)[0]
            raise ValueError("; ".join(filter(None, (fault.cause, fault.fix)))) from error


def _walk_fields(section: type[Section], prefix: str) -> Iterator[Option]:
    for key, field in section.model_fields.items():
        extra: Any = field.json_schema_extra
        if extra is None:
            for inner in list_models(field.annotation):
                if issubclass(inner, Section):
                    yield from _walk_fields(inner, f"{prefix}{key}.")
            continue
        name = extra["name"] or key
        # What is on by default has a flag that switches it off.
        word = name.removesuffix("_out").replace("_", "-")
        own_flag = f"no-{word}" if field.default is True else word
        flags = (extra["flags"] or own_flag).split()
        metavar = extra["metavar"] or ("" if list_choices(field.annotation) else "N")
        yield Option(
            f"{prefix}{key}",
            name,
            tuple(f"--{flag}" for flag in flags),
            metavar,
            extra["commands"] or section.commands,
            field,
            extra["bare"],
            extra["code"],
            extra["names"],
        )


@cache
def list_options(command: Command | None = None) -> tuple[Option, ...]:
    """List the options of a command, None for all, in the order of the configuration."""
    entries = _walk_fields(Config, "")
    return tuple(entry for entry in entries if command is None or command in entry.commands)


def list_code(values: Config | Settings) -> Iterator[tuple[Option, str]]:
    """List the code that a configuration names, each with its option. Functions of Python have no name in it."""
    for entry in list_options():
        if not entry.runs_code:
            continue
        section, key = entry.path.split(".")
        inner = values.get(section) if isinstance(values, Mapping) else getattr(values, section)
        value = inner.get(key) if isinstance(inner, Mapping) else getattr(inner, key, None)
        for code in value if isinstance(value, (list, tuple)) else (value,):
            if code and isinstance(code, str):
                yield entry, code


def drop_unset(values: Mapping[str, _T | None] | None) -> dict[str, _T]:
    """The values that are set: None stands for one that is not."""
    return {key: value for key, value in (values or {}).items() if value is not None}


def expand_names(overrides: Settings | None, command: Command) -> JsonObject:
    """Replace the names of a command's options by the paths of their fields; paths and sections stay.

    Raises ConfigError, with the nearest name, for a key that is neither.
    """
    paths = {entry.name: entry.path for entry in list_options(command)}
    expanded = {}
    for key, value in (overrides or {}).items():
        head = str(key).partition(".")[0]
        if key not in paths and head not in Config.model_fields:
            fix = suggest_names(head, (*paths, *Config.model_fields))
            raise ConfigError(f"option: {key}", "unknown key", fix, code="Q303")
        expanded[paths.get(key, key)] = value
    return expanded
