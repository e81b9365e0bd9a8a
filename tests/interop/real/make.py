"""Makes the files beside it with the real tools, each in an environment of its own.

    python tests/interop/real/make.py --environments FOLDER [TOOL ...]

A tool's environment is made once and kept. Versions are those of TOOLS; README.md says what each file is.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
# Tool -> what its environment holds beside torch.
TOOLS = {
    "aimet": ("aimet-onnx==2.42.0", "onnxscript"),
    "aimet_torch": ("aimet-torch==2.42.0", "onnxscript"),
    "brevitas": ("brevitas==0.13.4", "qonnx==1.0.0", "onnxscript", "onnxoptimizer"),
    "ppq": ("ppq==0.6.6", "onnx==1.16.2", "onnxruntime<1.20", "protobuf<3.21", "numpy<2", "setuptools"),
    "nncf": ("nncf==3.4.0", "onnx", "onnxruntime", "openvino"),
    "modelopt": ("nvidia-modelopt[onnx]==0.47.0",),
    "torchao": ("torchao==0.18.0", "onnx", "onnxscript"),
    "sparsebit": ("onnx", "pyyaml", "scipy", "tabulate", "yacs"),
    "ort": ("onnxruntime==1.32.0", "onnx"),
}
BODY = """<ir_version: 8, opset_import: ["" : 17]>
net (float[1,3,8,8] x) => (float[1,4] y) <int64[2] rows = {1, 24}> {
    c1 = Conv <pads=[1,1,1,1]>(x, w1, b1) r1 = Relu(c1)
    c2 = Conv <pads=[1,1,1,1]>(r1, w2, b2) s = Add(c2, r1) r2 = Relu(s)
    p = MaxPool <kernel_shape=[4,4], strides=[4,4]>(r2) f = Reshape(p, rows) y = Gemm <transB=1>(f, w3, b3)
}"""


def make_samples(count=16):
    """Inputs of the network."""
    return np.random.default_rng(1).standard_normal((count, 1, 3, 8, 8)).astype(np.float32)


def make_network(width=6):
    """A residual network of three weights and so many channels, as ONNX."""
    from onnx import numpy_helper, parser

    rng, model = np.random.default_rng(0), parser.parse_model(BODY.replace("24", str(4 * width)))
    shapes = {"w1": (width, 3, 3, 3), "b1": (width,), "w2": (width, width, 3, 3), "b2": (width,)}
    shapes |= {"w3": (4, 4 * width), "b3": (4,)}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 10)
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    return model


def make_torch_network(layers=None):
    """The same kind of network in torch; layers: of another package in the place of Conv2d, ReLU and Linear."""
    import torch
    from torch import nn

    conv, relu, linear = layers or (nn.Conv2d, nn.ReLU, nn.Linear)
    torch.manual_seed(0)
    return nn.Sequential(
        conv(3, 6, 3, padding=1), relu(), conv(6, 6, 3, padding=1), relu(), nn.MaxPool2d(4), nn.Flatten(), linear(24, 4)
    )


def make_aimet():
    """Encodings of all versions: 8 bits, 16-bit activations with a 4-bit weight, and weights in blocks."""
    import json

    from aimet_onnx import int4, int8, int16
    from aimet_onnx.quantsim import QuantizationSimModel, set_grouped_blockwise_quantization_for_weights

    def calibrate(sim):
        sim.compute_encodings([{"x": sample} for sample in make_samples()])
        return sim

    def export(sim, version, name):
        folder = HERE / "work"
        folder.mkdir(exist_ok=True)
        sim.export(str(folder), "m", encoding_version=version)
        root = json.loads((folder / "m.encodings").read_text())
        (HERE / name).write_text(json.dumps(root, indent=1) + "\n")
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    # aimet-onnx 2.42 reads 2.1.0 and does not write it; aimet-torch does.
    versions = ("0.6.1", "1.0.0", "2.0.0")
    for version in versions:
        sim = calibrate(QuantizationSimModel(make_network(), param_type=int8, activation_type=int8))
        export(sim, version, f"aimet.{version}.encodings")
        sim = calibrate(QuantizationSimModel(make_network(), param_type=int4, activation_type=int16))
        export(sim, version, f"aimet.w4a16.{version}.encodings")
    for version in versions[1:]:
        sim = QuantizationSimModel(make_network(), param_type=int8, activation_type=int16)
        set_grouped_blockwise_quantization_for_weights(
            sim, ("Gemm",), bitwidth=4, decompressed_bw=8, block_size=8, strict=False
        )
        export(calibrate(sim), version, f"aimet.lpbq.{version}.encodings")


def make_aimet_torch():
    """Encodings 2.1.0 of a network, with a weight in blocks, and the network's ONNX and its answers."""
    import torch
    from aimet_torch.quantsim import QuantizationSimModel
    from aimet_torch.quantsim.config_utils import set_grouped_blockwise_quantization_for_weights

    sample = torch.from_numpy(make_samples()[0])
    sim = QuantizationSimModel(make_torch_network().eval(), sample, default_param_bw=8, default_output_bw=8)
    set_grouped_blockwise_quantization_for_weights(
        sim, [torch.nn.Linear], bitwidth=4, symmetric=True, decompressed_bw=8, block_size=8
    )
    sim.compute_encodings(lambda model, _: [model(torch.from_numpy(sample)) for sample in make_samples()], None)
    names = {"input_names": ["x"], "output_names": ["y"], "dynamo": False}
    sim.onnx.export((sample,), str(HERE / "aimet_torch.onnx"), encoding_version="2.1.0", **names)
    (HERE / "aimet_torch.encodings").rename(HERE / "aimet_torch.2.1.0.encodings")
    np.save(HERE / "aimet_torch.answers.npy", sim.model(sample).detach().numpy())


def make_brevitas():
    """The same trained quantizers as QONNX (Quant, BipolarQuant, Trunc) and as QCDQ."""
    import torch
    from brevitas import nn as qnn
    from brevitas.export import export_onnx_qcdq, export_qonnx
    from brevitas.quant import Int8ActPerTensorFloat, SignedBinaryActPerTensorConst, SignedBinaryWeightPerTensorConst

    def make_conv(channels, *args, **options):
        return qnn.QuantConv2d(channels, *args, weight_bit_width=4, input_quant=Int8ActPerTensorFloat, **options)

    layers = (
        make_conv,
        lambda: qnn.QuantReLU(bit_width=4),
        lambda *sizes: qnn.QuantLinear(*sizes, True, weight_bit_width=3),
    )
    model = make_torch_network(layers)
    with torch.no_grad():
        for sample in make_samples():
            model(torch.from_numpy(sample))
    model.eval()
    sample = torch.from_numpy(make_samples()[0])
    export_qonnx(model, args=sample, export_path=str(HERE / "brevitas.qonnx.onnx"), opset_version=17)
    export_onnx_qcdq(model, args=sample, export_path=str(HERE / "brevitas.qcdq.onnx"), opset_version=17)
    np.save(HERE / "brevitas.answers.npy", model(sample).detach().numpy())
    torch.manual_seed(0)
    binary = torch.nn.Sequential(
        qnn.QuantIdentity(act_quant=SignedBinaryActPerTensorConst),
        qnn.QuantConv2d(3, 6, 3, weight_quant=SignedBinaryWeightPerTensorConst, bias=False),
        qnn.QuantReLU(bit_width=8, return_quant_tensor=True),
        qnn.TruncAvgPool2d(2, bit_width=4) if hasattr(qnn, "TruncAvgPool2d") else torch.nn.AvgPool2d(2),
    ).eval()
    export_qonnx(binary, args=sample, export_path=str(HERE / "brevitas.binary.onnx"), opset_version=17)
    result = binary(sample)
    join_data("brevitas.qonnx.onnx", "brevitas.qcdq.onnx", "brevitas.binary.onnx")
    np.save(HERE / "brevitas.binary.answers.npy", getattr(result, "value", result).detach().numpy())


def make_ppq():
    """The JSON of a configuration in PPQ's own form, TensorRT's ranges, and Q/DQ."""
    import onnx
    import torch
    from ppq import TargetPlatform
    from ppq.api import export_ppq_graph, quantize_onnx_model

    onnx.save(make_network(), HERE / "ppq.float.onnx")
    samples = [torch.from_numpy(sample) for sample in make_samples()]
    exports = {
        "ppq.json": (TargetPlatform.TRT_INT8, TargetPlatform.ONNX),
        "ppq.trt.json": (TargetPlatform.TRT_INT8, TargetPlatform.TRT_INT8),
        "ppq.ppl.json": (TargetPlatform.PPL_CUDA_INT8, TargetPlatform.PPL_CUDA_INT8),
        "ppq.qdq": (TargetPlatform.TRT_INT8, TargetPlatform.ONNXRUNTIME),
    }
    for name, (platform, written) in exports.items():
        graph = quantize_onnx_model(
            str(HERE / "ppq.float.onnx"), samples, 8, [1, 3, 8, 8], platform, device="cpu", verbose=0
        )
        export_ppq_graph(
            graph, written, str(HERE / "ppq.qdq.onnx"), str(HERE / (name if ".json" in name else "unused"))
        )
    for name in ("ppq.float.onnx", "unused", "quantized.wts"):
        (HERE / name).unlink(missing_ok=True)


def make_nncf():
    """Q/DQ as NNCF writes them into ONNX."""
    import nncf
    import onnx

    data = nncf.Dataset(list(make_samples()), lambda sample: {"x": sample})
    onnx.save(nncf.quantize(make_network(), data, subset_size=16), HERE / "nncf.onnx")


def make_modelopt():
    """Q/DQ as ModelOpt writes them, for TensorRT."""
    import onnx
    from modelopt.onnx.quantization import quantize

    # It leaves convolutions of few channels float.
    onnx.save(make_network(16), HERE / "work.onnx")
    quantize(
        str(HERE / "work.onnx"),
        calibration_data={"x": make_samples().reshape(-1, 3, 8, 8)},
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=str(HERE / "modelopt.onnx"),
    )
    for path in HERE.glob("work*"):
        path.unlink()


def make_torchao():
    """Q/DQ of torch's own quantization (PT2E, in torchao), written by torch.onnx."""
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    sample = torch.from_numpy(make_samples()[0])
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(make_torch_network().eval(), (sample,)).module(), quantizer)
    for calibration in make_samples():
        prepared(torch.from_numpy(calibration))
    program = torch.onnx.export(convert_pt2e(prepared), (sample,), dynamo=True, input_names=["x"], output_names=["y"])
    program.save(str(HERE / "torchao.onnx"))


def make_sparsebit():
    """Q/DQ of 4 bits with Sparsebit's attribute `bits`, by its own code.

    It is not on PyPI: its source stands in the folder that SPARSEBIT names. Of torchvision it imports a layer that this
    network does not have, and its notes count nodes one by one, which the exporter's Identity of today would shift.
    """
    import os
    import tempfile
    from types import ModuleType

    import onnx
    import torch

    sys.path.insert(0, os.environ["SPARSEBIT"])
    for name in ("torchvision", "torchvision.ops", "torchvision.ops.stochastic_depth"):
        sys.modules[name] = ModuleType(name)
    sys.modules["torchvision.ops.stochastic_depth"].stochastic_depth = lambda x, *_: x
    from sparsebit.quantization import QuantModel, parse_qconfig

    write = torch.onnx.export

    def export(model, sample, name, **options):
        write(model, sample, name, dynamo=False, **options)
        proto = onnx.load(name)
        copies = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "Identity"}
        kept = [node for node in proto.graph.node if node.op_type != "Identity"]
        for node in kept:
            for k, tensor in enumerate(node.input):
                node.input[k] = copies.get(tensor, tensor)
        del proto.graph.node[:]
        proto.graph.node.extend(kept)
        onnx.save(proto, name)

    torch.onnx.export = export
    layer = "QUANTIZER: {TYPE: uniform, BIT: 4}, OBSERVER: {TYPE: MINMAX}"
    text = f"BACKEND: virtual\nW: {{QSCHEME: per-channel-symmetric, {layer}}}\n"
    text += f"A: {{QSCHEME: per-tensor-affine, {layer}}}\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "q.yaml").write_text(text)
        model = QuantModel(make_torch_network().eval(), parse_qconfig(f"{folder}/q.yaml"))
        model.prepare_calibration()
        for sample in make_samples():
            model(torch.from_numpy(sample))
        model.calc_qparams()
        model.set_quant(w_quant=True, a_quant=True)
        sample = torch.from_numpy(make_samples()[0])
        np.save(HERE / "sparsebit.answers.npy", model(sample).detach().numpy())
        model.export_onnx(sample, name=f"{folder}/m.onnx", extra_info=True)
        (HERE / "sparsebit.onnx").write_bytes(Path(folder, "m_extra.onnx").read_bytes())


def make_ort():
    """TensorQuantOverrides as JSON, of the numbers of ONNX Runtime's own quantizer, and what it makes of them."""
    import json
    import tempfile

    import onnx
    from onnx import numpy_helper
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.samples = iter(make_samples())

        def get_next(self):
            sample = next(self.samples, None)
            return None if sample is None else {"x": sample}

    with tempfile.TemporaryDirectory() as folder:
        onnx.save(make_network(), f"{folder}/m.onnx")
        quantize_static(f"{folder}/m.onnx", f"{folder}/q.onnx", Reader(), quant_format=QuantFormat.QDQ)
        quantized = onnx.load(f"{folder}/q.onnx")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantized.graph.initializer}
    overrides = {}
    for node in quantized.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero = (values[name].item() for name in node.input[1:])
            overrides[node.input[0].removesuffix("_QuantizeLinear_Input")] = [{"scale": scale, "zero_point": zero}]
    (HERE / "ort.overrides.json").write_text(json.dumps(overrides, indent=1) + "\n")


def join_data(*names):
    """Put the weights that torch.onnx wrote beside a model into it."""
    import onnx

    for name in names:
        onnx.save(onnx.load(HERE / name), HERE / name)
        (HERE / f"{name}.data").unlink(missing_ok=True)


def run_tool(tool, environments):
    """Make a tool's environment, if it is not there, and its files."""
    folder = environments / f"{tool}-venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        torch = () if tool == "ort" else (TORCH,)
        # torch first: others would take the newest one that they find.
        for packages in filter(None, (torch, (*torch, *TOOLS[tool]))):
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    subprocess.run([python, __file__, "--here", tool], check=True)


def main():
    """Make the files of the tools that are named; of all without a name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []])
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--here", action="store_true", help="with the packages of this environment")
    given = parser.parse_args()
    for tool in given.tools or TOOLS:
        if given.here:
            globals()[f"make_{tool}"]()
        else:
            run_tool(tool, given.environments.resolve())


if __name__ == "__main__":
    sys.exit(main())
