"""Samples: .npz, .npy, .pb, .json and images, in files and folders, damaged or of values and shapes nobody wants."""

import base64
import io
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from onnx import numpy_helper
from PIL import Image

import onnxq
from tests.fuzz.judge import check_result
from tests.fuzz.mutate import mutate_bytes, mutate_text, mutate_tree
from tests.fuzz.nets import feeds, net

_CONFIG = "effort: fast\ndata: {images: {size: [8, 8], mean: [0.5, 0.5, 0.5], std: [0.2, 0.2, 0.2]}}\n"
_DTYPES = (
    "<f4", ">f4", "<f2", "<f8", "<i8", "|i1", "|u1", "|b1", "<c8", "<U4", "|S3", "<M8[s]", "|O", "<f4,<i4", "|V4", "<u8"
)  # fmt: skip
_SHAPES = ((), (0,), (1, 0, 8, 8), (2,), (1,) * 33, (4, 3, 8, 9), (0, 3, 8, 8), (1, 1), (8, 8, 3))
_STRANGE = (np.nan, np.inf, -np.inf, 1e38, 3e38, -1e38, 1e-45, 0.0, 255.0, 1e300)


def _arrays(rng: Random, name: str) -> dict[str, np.ndarray]:
    """Good samples, stacked, to be damaged."""
    given = feeds(net(name), rng.randrange(4))
    axis = 1 if name == "recurrent" else 0
    return {key: np.concatenate([np.atleast_1d(one[key]) for one in given], axis) for key in given[0]}


def _odd(rng: Random, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The samples with strange values, shapes, types or names."""
    out: dict[str, Any] = dict(arrays)
    key = rng.choice(list(out))
    array = np.array(out[key])
    kind = rng.randrange(8)
    with np.errstate(all="ignore"):
        if kind == 0 and array.size:
            array = array.astype(np.float64)
            array.flat[rng.randrange(array.size)] = rng.choice(_STRANGE)
            array = array.astype(out[key].dtype)
        elif kind == 1:
            array = np.full_like(array, rng.choice(_STRANGE) if array.dtype.kind == "f" else 1)
        elif kind == 2:
            shape = rng.choice((*_SHAPES, array.shape[1:]))
            array = np.zeros(shape[:32], np.float32)
        elif kind == 3:
            array = array[: rng.randrange(len(array) + 1)] if array.ndim else array
        elif kind == 4:
            array = array.astype(
                rng.choice((np.float16, np.float64, np.int8, np.uint8, np.int64, np.complex64, bool, "S4", "U4"))
            )
        elif kind == 5:
            out[rng.choice(("", "X", "a/b", "é", "x\0", "../x", "n" * 300))] = out.pop(key)
            return out
        elif kind == 6:
            del out[key]
            return out
        else:
            array = array * rng.choice((1e-30, 1e30, 1e37, -1, 0))
    out[key] = array
    return out


def _npy(rng: Random, array: np.ndarray) -> bytes:
    data, kind = _plain(array), rng.randrange(5)
    if kind == 0:
        # The header is Python's text of a dict; what it says need not be so.
        end = 10 + int.from_bytes(data[8:10], "little")
        said = {"descr": rng.choice(_DTYPES), "fortran_order": rng.choice((True, False, 1, None)), "shape": array.shape}
        said["shape"] = rng.choice(
            (array.shape, (-1,), (2**62, 4), (2**40,), (0,), (1.5,), "x", (True,), [4], (10**30,), ())
        )
        text = rng.choice(
            (repr(said), repr({**said, "more": 1}), "{" * 90, "1+" * 50 + "1", repr(said)[:-1], "\0" * 20, "")
        )
        text = text.replace("'|O'", "'O'") + "\n"
        return (
            b"\x93NUMPY"
            + bytes((rng.choice((1, 1, 2, 3, 9)), 0))
            + len(text).to_bytes(2, "little")
            + text.encode("latin1")
            + data[end:]
        )
    return mutate_bytes(rng, data) if kind <= 3 else data


def _npz(rng: Random, arrays: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}{rng.choice(('.npy',) * 8 + ('', '.txt', '/'))}" or "_")
            archive.writestr(info, _npy(rng, array) if rng.random() < 0.5 else _plain(array))
    data = sink.getvalue()
    return mutate_bytes(rng, data) if rng.random() < 0.5 else data


def _plain(array: Any) -> bytes:
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=True)
    return sink.getvalue()


def _write_npz(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    (folder / "data.npz").write_bytes(_npz(rng, arrays))
    return "data.npz"


def _write_npy(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    array = next(iter(arrays.values()), np.zeros(0, np.float32))
    (folder / "data.npy").write_bytes(_npy(rng, array))
    return "data.npy"


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)[:100]


def _write_folder(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    """One file an input, a folder an input, .npz files, or a mixture that no reader takes."""
    place = folder / "data"
    place.mkdir()
    kind = rng.randrange(4)
    for k in range(rng.choice((0, 1, 2, 3))):
        if kind == 0:
            (place / f"{k}.npz").write_bytes(_npz(rng, arrays))
        for name, array in arrays.items() if kind else ():
            inner = place if kind == 1 else place / _file_name(name)
            inner.mkdir(exist_ok=True)
            (inner / (f"{_file_name(name)}.npy" if kind == 1 else f"{k}.npy")).write_bytes(_npy(rng, array))
    if rng.random() < 0.2:
        (place / rng.choice(("x.npz", "b.npy", "c.txt", ".hidden", "d.json", "e.png", "input_0.pb"))).write_bytes(
            rng.randbytes(50)
        )
    if rng.random() < 0.1:
        (place / rng.choice(("10.npz", "19.npy", "x", "z.png"))).mkdir(exist_ok=True)
    return "data"


def _write_pb(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    place = folder / "data" / "test_data_set_0"
    place.mkdir(parents=True)
    for k, (name, array) in enumerate(arrays.items()):
        try:
            data = numpy_helper.from_array(np.asarray(array), name).SerializeToString()
        except Exception:
            data = b""
        (place / f"input_{k}.pb").write_bytes(mutate_bytes(rng, data) if rng.random() < 0.7 else data)
    return rng.choice(("data", "data/test_data_set_0", "data/test_data_set_0/input_0.pb"))


def _write_json(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    """Polygraphy's saved inputs."""
    tree: Any = [
        {name: {"array": base64.b64encode(_npy(rng, array) if rng.random() < 0.3 else _plain(array)).decode(),
                "polygraphy_class": "ndarray"} for name, array in arrays.items()}
    ]  # fmt: skip
    tree = mutate_tree(rng, tree) if rng.random() < 0.7 else tree
    text = json.dumps(tree)
    (folder / "data.json").write_text(mutate_text(rng, text) if rng.random() < 0.2 else text, errors="surrogatepass")
    return "data.json"


def _write_images(rng: Random, folder: Path, arrays: dict[str, Any]) -> str:
    place = folder / "data"
    place.mkdir()
    for k in range(rng.choice((1, 2, 3))):
        mode = rng.choice(("RGB", "L", "RGBA", "P", "1", "CMYK", "I", "F", "LA"))
        image = Image.new(mode, rng.choice(((8, 8), (1, 1), (20, 3), (8, 300), (1, 2000))))
        suffix = rng.choice(("png", "jpg", "bmp", "gif", "tiff", "webp", "ppm"))
        sink = io.BytesIO()
        try:
            image.save(sink, {"jpg": "JPEG"}.get(suffix, suffix))
        except (OSError, ValueError, KeyError):
            image.convert("RGB").save(sink, {"jpg": "JPEG"}.get(suffix, suffix))
        data = sink.getvalue()
        (place / f"{k}.{suffix}").write_bytes(mutate_bytes(rng, data) if rng.random() < 0.7 else data)
    return "data"


_WRITERS: tuple[Callable[[Random, Path, dict[str, Any]], str], ...] = (
    _write_npz, _write_npz, _write_npy, _write_folder, _write_pb, _write_json, _write_images,
)  # fmt: skip


def make_case(rng: Random, folder: Path) -> str:
    """Write a network, damaged samples for it, and case.json that says which they are."""
    writer = rng.choice(_WRITERS)
    name = (
        "conv" if writer in (_write_images, _write_npy) else rng.choice(("conv", "attention", "branches", "recurrent"))
    )
    arrays = _arrays(rng, name)
    odd = rng.random() < 0.5
    given = writer(rng, folder, _odd(rng, arrays) if odd else arrays)
    (folder / "model.onnx").write_bytes(net(name).SerializeToString())
    (folder / "config.yaml").write_text(_CONFIG if writer is _write_images else "effort: fast\n")
    (folder / "case.json").write_text(json.dumps({"data": given}))
    return f"{name}, {writer.__name__.strip('_')}, {'odd' if odd else 'good'} values"


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Quantize on the samples. The answers are judged on good ones, by onnxq's own check on these."""
    path, out = folder / "model.onnx", work / "out.onnx"
    given = folder / json.loads((folder / "case.json").read_text())["data"]
    result = onnxq.quantize(path, given, folder / "config.yaml", overrides={"latency": False, "threads": 1}, out=out)
    check_result(result, out, path, ())
    return ["out.onnx"]
