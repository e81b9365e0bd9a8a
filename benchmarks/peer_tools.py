"""The other tools, one function each, for children of `peers.py`: they run in interpreters of their own, whose packages
may contradict onnxq's, so nothing of onnxq is imported here and each tool only where it is asked for.

    python benchmarks/peer_tools.py TOOL SOURCE.onnx SAMPLES.npz TARGET.onnx     the last line is the tool's version
    python benchmarks/peer_tools.py count FILE.onnx                              operators that hold or make integers

All with what they do by themselves at W8A8: int8 weights and activations, Q/DQ, no search; "dynamic" ones
take no samples.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

OPS = (
    "QuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "DynamicQuantizeLinear",
    "DynamicQuantizeLSTM",
    "MatMulNBits",
)


def samples(source: str, data: str) -> Iterator[dict[str, np.ndarray]]:
    """Feeds of one sample each; an array with one dimension more than its input has one run a sample."""
    arrays = dict(np.load(data))
    ranks = {one.name: len(one.type.tensor_type.shape.dim) for one in onnx.load(source).graph.input}
    for i in range(len(next(iter(arrays.values())))):
        yield {
            name: np.asarray(a[i]) if a.ndim == ranks[name] + 1 else a[i : i + 1]
            for name, a in arrays.items()
        }


def reader(source: str, data: str) -> Any:
    """The samples as onnxruntime and what is built on it want them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rewind()

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

        def rewind(self) -> None:
            self.left = samples(source, data)

    return Reader()


@contextmanager
def preprocess(source: str, target: str) -> Iterator[str]:
    """The model after onnxruntime's own preprocessing, which folds casts of weights too."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready = f"{target}.pre.onnx"
    try:
        quant_pre_process(source, ready)
    # Its symbolic shape inference does not know every operator; its own advice is to skip it.
    except Exception:
        quant_pre_process(source, ready, skip_symbolic_shape=True)
    yield ready
    Path(ready).unlink()


def ort(source: str, data: str, target: str, method: str, symmetric: bool = False) -> str:
    """quantize_static after its own preprocessing: weights per channel, activations asymmetric unless asked."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    with preprocess(source, target) as ready:
        quantize_static(
            ready,
            target,
            reader(source, data),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=getattr(CalibrationMethod, method),
            extra_options={"ActivationSymmetric": symmetric},
        )
    return f"onnxruntime {onnxruntime.__version__}"


def ort_dynamic(source: str, target: str) -> str:
    """quantize_dynamic with its own defaults, which are those of Olive's OnnxDynamicQuantization too."""
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    with preprocess(source, target) as ready:
        quantize_dynamic(ready, target)
    return f"onnxruntime {onnxruntime.__version__}"


def optimum(source: str, target: str) -> str:
    """Optimum's dynamic configuration for CPUs with VNNI: weights per channel."""
    import optimum.onnxruntime as tool
    from optimum.version import __version__

    with preprocess(source, target) as ready, TemporaryDirectory(dir=Path(target).parent) as folder:
        config = tool.AutoQuantizationConfig.avx512_vnni(is_static=False)
        made = tool.ORTQuantizer.from_pretrained(Path(ready).parent, file_name=Path(ready).name)
        made.quantize(config, save_dir=folder)
        (file,) = Path(folder).glob("*.onnx")
        file.replace(target)
    return f"optimum {__version__}"


def quark_dynamic(source: str, target: str) -> str:
    """Quark's dynamic configuration, the only one it has: uint8 weights."""
    import quark
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config.config import Config
    from quark.onnx.quantization.config.custom_config import get_default_config

    with preprocess(source, target) as ready:
        config = Config(global_quant_config=get_default_config("UINT8_DYNAMIC_QUANT"))
        ModelQuantizer(config).quantize_model(ready, target)
    return f"quark {quark.__version__}"


def modelopt(source: str, data: str, target: str, method: str) -> str:
    """ModelOpt, calibrated on the CPU; what is not int8 becomes float16, as it does by itself."""
    import modelopt
    from modelopt.onnx.quantization import quantize

    copy = f"{target}.source.onnx"  # it leaves files beside its input
    shutil.copyfile(source, copy)
    quantize(
        copy,
        quantize_mode="int8",
        calibration_data=dict(np.load(data)),
        calibration_method=method,
        calibration_eps=["cpu"],
        output_path=target,
    )
    Path(copy).unlink()
    return f"modelopt {modelopt.__version__}"


def ort_blocks(source: str, target: str, algorithm: str) -> str:
    """MatMulNBitsQuantizer: weights alone, 4 bits in blocks of 32, computed in float."""
    import onnxruntime
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    configs = {
        "symmetric": lambda: tool.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True),
        "asymmetric": lambda: tool.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=False),
        "hqq": lambda: tool.HQQWeightOnlyQuantConfig(block_size=32),
        "k_quant": tool.KQuantWeightOnlyQuantConfig,
    }
    made = tool.MatMulNBitsQuantizer(
        onnx.load(source),
        block_size=32,
        is_symmetric=algorithm == "symmetric",
        algo_config=configs[algorithm](),
    )
    made.process()
    made.model.save_model_to_file(target)
    return f"onnxruntime {onnxruntime.__version__}"


def modelopt_blocks(source: str, data: str, target: str, method: str) -> str:
    """ModelOpt's weights of 4 bits in blocks of 32."""
    import modelopt
    from modelopt.onnx.quantization.int4 import quantize

    made = quantize(
        source, calibration_method=method, calibration_data_reader=reader(source, data), calibration_eps=["cpu"],
        use_external_data_format=False, block_size=32,
    )  # fmt: skip
    onnx.save(made, target)
    return f"modelopt {modelopt.__version__}"


def nncf(source: str, data: str, target: str) -> str:
    """NNCF's post-training quantization: fast bias correction, all samples."""
    import nncf

    feeds = list(samples(source, data))
    made = nncf.quantize(onnx.load(source), nncf.Dataset(feeds), subset_size=len(feeds))
    onnx.save(made, target)
    return f"nncf {nncf.__version__}"


def quark(source: str, data: str, target: str) -> str:
    """Quark's configuration for int8 on CPUs, with its cross-layer equalization."""
    import quark
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config.config import Config
    from quark.onnx.quantization.config.custom_config import get_default_config

    config = get_default_config("S8S8_AAWS")
    config.include_cle = True
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(
        source, target, reader(source, data)
    )
    return f"quark {quark.__version__}"


def count(path: str) -> int:
    """Operators of a file that hold or make integers, subgraphs included."""

    def inside(graph: onnx.GraphProto) -> int:
        bodies = [
            a.g
            for node in graph.node
            for a in node.attribute
            if a.type == onnx.AttributeProto.GRAPH
        ]
        return sum(node.op_type in OPS for node in graph.node) + sum(map(inside, bodies))

    model = onnx.load(path, load_external_data=False)
    return inside(model.graph)


TOOLS: dict[str, Callable[[str, str, str], str]] = {
    "ort-minmax": lambda *files: ort(*files, "MinMax"),
    "ort-percentile": lambda *files: ort(*files, "Percentile"),
    "ort-entropy": lambda *files: ort(*files, "Entropy"),
    "ort-minmax-symmetric": lambda *files: ort(*files, "MinMax", True),
    "ort-percentile-symmetric": lambda *files: ort(*files, "Percentile", True),
    "modelopt": lambda *files: modelopt(*files, "max"),
    "modelopt-entropy": lambda *files: modelopt(*files, "entropy"),
    "nncf": nncf,
    "ort-blocks-symmetric": lambda source, _, target: ort_blocks(source, target, "symmetric"),
    "ort-blocks-asymmetric": lambda source, _, target: ort_blocks(source, target, "asymmetric"),
    "ort-blocks-hqq": lambda source, _, target: ort_blocks(source, target, "hqq"),
    "ort-blocks-k_quant": lambda source, _, target: ort_blocks(source, target, "k_quant"),
    "modelopt-blocks-awq_clip": lambda *files: modelopt_blocks(*files, "awq_clip"),
    "quark": quark,
    "ort-dynamic": lambda source, _, target: ort_dynamic(source, target),
    "optimum-dynamic": lambda source, _, target: optimum(source, target),
    "quark-dynamic": lambda source, _, target: quark_dynamic(source, target),
}


def main() -> None:
    """Run one tool, or count."""
    tool, *files = sys.argv[1:]
    paths = [str(Path(file).resolve()) for file in files]
    if tool == "count":
        print(count(paths[0]))
        return
    source, data, target = paths
    os.chdir(Path(target).parent)  # some leave files in the working folder
    print(f"\n{TOOLS[tool](source, data, target)}")


if __name__ == "__main__":
    main()
