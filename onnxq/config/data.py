"""What the calibration data are, how models are run and how the command checks itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from onnxq.config.values import Frozen, one_or_many

# Beyond these no picture fits memory, and no engine takes the number.
_Pixels = Annotated[int, Field(ge=1, le=2**16)]
_MOST_THREADS = 4096


class ImageConfig(Frozen):
    """How an image file becomes the model's input: decoded, resized, cropped, scaled to `range`, minus mean, over std.

    size: (height, width) the model gets. resize: shorter side before a centre crop (None: it just covers `size`).
    crop: "center" cuts the middle out, "pad" fits the whole image and fills with `fill`, "none" stretches.
    range: what pixel values 0…255 become. mean, std: () or one value, or one per channel, in units of `range`.
    input: the model input that takes the image; "" when the model has only one.
    """

    size: tuple[_Pixels, _Pixels]
    resize: _Pixels | None = None
    crop: Literal["center", "pad", "none"] = "center"
    fill: int = Field(default=0, ge=0, le=255)
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos", "box"] = "bilinear"
    color: Literal["RGB", "BGR", "GRAY"] = "RGB"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    range: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
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
    """Calibration data. samples: at most so many (None: all). batch: samples per run (None: chosen from the model)."""

    images: ImageConfig | None = None
    samples: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)
    batch: int | None = Field(default=None, ge=1)


class RuntimeConfig(Frozen):
    """How ONNX Runtime runs models. libraries: shared libraries with the custom operators that a model uses; in a file
    relative to its folder.
    """

    libraries: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()


class VerifyConfig(Frozen):
    """The command's own check. holdout: samples kept from calibration (None: chosen from their number).

    latency: time float and int8 side by side. threads: for that timing and for the checking runs.
    """

    holdout: int | None = Field(default=None, ge=0)
    latency: bool = True
    threads: int = Field(default=1, ge=0, le=_MOST_THREADS)
