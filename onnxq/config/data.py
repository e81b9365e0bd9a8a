"""Sections of the configuration for data, runs of the model, the checks of the result and the files written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from onnxq.config.values import MAKING, Command, Ends, File, Files, Section, Size, option

# Pixels per side: a larger image does not fit into memory.
_Pixels = Annotated[int, Field(ge=1, le=2**16)]
# The word for the tokenizer of models that read bytes, in the place of a folder.
BYTES = "bytes"
# No engine accepts more.
_MOST_THREADS = 4096


class ImageConfig(Section):
    """Preprocessing of image files: decode, resize, crop, scale to `range`, subtract mean, divide by std."""

    # (height, width) of the model's input.
    size: tuple[_Pixels, _Pixels]
    # Pixels of the shorter side before a centre crop; None: as many as just cover `size`.
    resize: _Pixels | None = None
    # "center" cuts out the middle, "pad" fits the whole image and fills the rest with `fill`, "none" stretches.
    crop: Literal["center", "pad", "none"] = "center"
    fill: int = Field(default=0, ge=0, le=255)
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos", "box"] = "bilinear"
    color: Literal["RGB", "BGR", "GRAY"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    # Pixel values 0…255 are mapped to this interval.
    range: Ends = (0.0, 1.0)
    # In units of `range`: none, one value, or one per channel.
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    # The model input for the image; "" if the model has only one.
    input: str = ""

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _channels(self) -> ImageConfig:
        channels = 1 if self.color == "GRAY" else 3
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            if count not in (0, 1, channels):
                raise ValueError(
                    f"{name} has {count} values; {self.color} has {channels} channel(s)"
                )
        if any(value <= 0 for value in self.std):
            raise ValueError("std must be above 0")
        if self.range[0] >= self.range[1]:
            raise ValueError("range must rise, e.g. [0, 1] or [-1, 1]")
        return self


# Commands that take an option, by what they do with a model.
_IMPORTING = Command.IMPORT | Command.IMPORT_WEIGHTS
_MEASURING = Command.PROFILE | Command.REPORT
_FINISHING = MAKING | Command.APPLY | Command.CONVERT
_WRITING = _FINISHING | Command.IMPORT_WEIGHTS
_CALIBRATING = _FINISHING | Command.IMPORT | Command.VARIANTS
_READING = _CALIBRATING | _IMPORTING | Command.PLAN | Command.DIFF
_RUNNING = _READING | Command.PROVE | _MEASURING
_LOADING = _RUNNING | Command.BENCH | Command.PERPLEXITY
_CHECKING = _WRITING | Command.VARIANTS
_TIMING = _MEASURING | Command.BENCH | Command.PERPLEXITY
# Those that compile for a device.
_COMPILING = Command.PROVE | Command.DIFF | Command.QUANTIZE | Command.APPLY


class DataConfig(Section):
    """Calibration data."""

    images: ImageConfig | None = None
    # None: all.
    samples: int | None = option(
        None, "Number of samples to use at most.", _READING | Command.PERPLEXITY, ge=1
    )
    seed: int = option(0, "Seed of every random choice.", _RUNNING | Command.PERPLEXITY, ge=0)
    # "": none. A path in a file is relative to its folder.
    tokenizer: File = option(
        "",
        "The tokenizer of a text as DATA: tokenizer.json, its folder, or `bytes`.",
        _LOADING,
        metavar="FOLDER",
    )
    # None: the model's own, or 256.
    sequence_length: int | None = option(
        None, "Number of tokens in a sample of text. [default: the model's, or 256]", _LOADING, ge=2
    )
    # None: chosen from the model.
    batch: int | None = option(
        None, "Number of samples in one run (batch size).", _CALIBRATING, ge=1
    )
    memory_limit: Size | None = option(
        None,
        "Limit on the tensors kept of one run, in bytes or as 512MB, 2GB.",
        _CALIBRATING | Command.DIFF,
        metavar="SIZE",
    )
    allow_missing: bool = option(
        False,
        "Leave float what the import has no scale for, and skip weights that the model does not have or ONNX not hold.",
        _IMPORTING,
    )


class RuntimeConfig(Section):
    """Options of the engines that run a model."""

    # Paths in a file are relative to its folder.
    libraries: Files = option(
        (),
        "A shared library with custom operators for ONNX Runtime; repeatable.",
        _LOADING,
        name="ort_library",
        metavar="FILE.so",
        code=True,
    )
    plugins: Files = option(
        (),
        "A shared library with TensorRT plugins; repeatable.",
        MAKING | Command.PLAN | Command.PROVE | Command.DIFF | Command.BENCH,
        name="plugin",
        metavar="FILE.so",
        code=True,
    )
    provider: str = option(
        "",
        "Execution provider of ONNX Runtime for calibration and checks: cpu, cuda, openvino or another that is "
        "installed. [default: cpu]",
        _READING | _TIMING,
        metavar="NAME",
    )
    soc: str = option(
        "",
        "Chip to build for, by name or number: SM8650, 57; for an engine that builds for chips. [default: its own]",
        _COMPILING,
        metavar="NAME",
    )
    htp_arch: str = option(
        "",
        "Architecture of the HTP, Qualcomm's NPU, to build for, e.g. 75. [default: that of `soc=…`]",
        _COMPILING,
        metavar="75",
    )


class ScaleConfig(Section):
    """Workers to spread the work over, and the folder that interrupted work goes on from."""

    commands = MAKING | _MEASURING
    workers: int = option(
        1,
        "Number of processes that share calibration, weight rounding and trials.",
        ge=1,
        le=_MOST_THREADS,
    )
    # Of sessions whose runs show in the result. Their sums, and so its last bits, depend on it.
    threads: int = option(
        0,
        "Threads of each run of samples; 0: all cores.",
        name="run_threads",
        ge=0,
        le=_MOST_THREADS,
    )
    # "": none.
    # Both sides send each other pickled objects, and unpickling runs code.
    dask: str = option(
        "",
        "Address of a Dask scheduler whose workers share the work, e.g. tcp://10.0.0.1:8786.",
        metavar="ADDRESS",
        code=True,
    )
    # A folder; "": none; "auto": beside the model.
    resume: File = option(
        "",
        "Keep finished work in a folder and continue from it. [default without DIR: MODEL.resume]",
        metavar="[DIR]",
        bare="auto",
    )
    # "": observed in this run.
    ranges: File = option(
        "",
        "Read activation ranges from a file that `onnxq merge` wrote.",
        Command.QUANTIZE,
        metavar="RANGES.json",
    )


class VerifyConfig(Section):
    """The check of the result against the float model."""

    # None: chosen from the number of samples.
    holdout: int | None = option(
        None,
        "Number of samples held back from calibration to check the result on.",
        _CHECKING,
        ge=0,
    )
    latency: bool = option(
        True, "Time the float and the quantized model.", _CHECKING | Command.PERPLEXITY
    )
    # Samples that the target's engine answers where it is emulated, as an NPU is; 0: none, and it does not compile.
    emulated: int = 2
    # Run it with ONNX Runtime's optimizations even where it is for another engine and they are known to misread it.
    optimized: bool = False
    threads: int = option(
        1,
        "Threads for checking, comparing and timing; 0: all cores.",
        _CHECKING | Command.DIFF | _TIMING,
        ge=0,
        le=_MOST_THREADS,
    )


class OutputConfig(Section):
    """The files written beside the path that a command is given."""

    # "": none.
    plan: File = option(
        "",
        "Also write the plan with its scales, for `onnxq apply`.",
        _WRITING,
        name="plan_out",
        metavar="OUT.json",
    )
    compiled: File = option(
        "",
        "Also compile the result for the device of its target, into a model that is loaded there in its place.",
        _WRITING,
        name="compile_out",
        metavar="OUT.onnx",
    )
    report: File = option(
        "",
        "Also write the page of `onnxq report`.",
        MAKING,
        name="report_out",
        metavar="OUT.html",
    )
    bits_attribute: bool = option(
        False,
        "Write the attribute `bits` on Q/DQ nodes; ONNX Runtime and onnx.checker refuse the file.",
        _WRITING | Command.ANNOTATE,
        flags="emit-bits-attribute bits-attribute",
    )
    external_data: bool = option(
        False, "Write the weights to a separate file beside the model.", _WRITING | Command.ANNOTATE
    )
    notes: Literal["full", "names", "none"] = option(
        "full",
        "Notes that stay in the file. full: the plan, a record of each site, doc strings; names: node names "
        "and the bits of each site; none: nothing.",
        _CHECKING,
    )
    rename: bool = option(False, "Rename the Q and DQ nodes after their sites.", Command.ANNOTATE)
