"""Sections of the configuration for data, runs of the model and the checks of the result."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from onnxq.config.values import Frozen, wrap_word

# Pixels per side: a larger image does not fit into memory.
_Pixels = Annotated[int, Field(ge=1, le=2**16)]
# No engine accepts more.
_MOST_THREADS = 4096


class ImageConfig(Frozen):
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
    range: tuple[float, float] = (0.0, 1.0)
    # In units of `range`: none, one value, or one per channel.
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    # The model input for the image; "" if the model has only one.
    input: str = ""

    @field_validator("size", mode="before")
    @classmethod
    def _square(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value, value)
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _channels(self) -> ImageConfig:
        channels = 1 if self.color == "GRAY" else 3
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (0, 1, channels):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} values; {self.color} has {channels} channel(s)"
                )
        if any(value <= 0 for value in self.std):
            raise ValueError("std must be above 0")
        if self.range[0] >= self.range[1]:
            raise ValueError("range must rise, e.g. [0, 1] or [-1, 1]")
        return self


class DataConfig(Frozen):
    """Calibration data."""

    images: ImageConfig | None = None
    # At most so many; None: all.
    samples: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    # Samples per run; None: chosen from the model.
    batch: int | None = Field(default=None, ge=1)


class RuntimeConfig(Frozen):
    """Options of ONNX Runtime, and libraries of either engine."""

    # Shared libraries with the custom operators of a model. Paths in a file are relative to its folder.
    libraries: Annotated[tuple[str, ...], BeforeValidator(wrap_word)] = ()
    # Shared libraries with plugins of TensorRT, for the operators that it builds; paths as above.
    plugins: Annotated[tuple[str, ...], BeforeValidator(wrap_word)] = ()
    # The execution provider that calibration and checks run on: cpu, cuda, tensorrt, openvino …
    provider: str = "cpu"


class VerifyConfig(Frozen):
    """The check of the result against the float model."""

    # Samples kept from calibration; None: chosen from their number.
    holdout: int | None = Field(default=None, ge=0)
    # Time the float and the quantized model side by side.
    latency: bool = True
    # For that timing and for the checking runs; 0: all cores.
    threads: int = Field(default=1, ge=0, le=_MOST_THREADS)
