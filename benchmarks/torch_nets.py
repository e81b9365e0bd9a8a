#!/usr/bin/env python3
"""The PyTorch front end on the nets of torchvision, timm and transformers that are installed, as one table.

    python benchmarks/torch_nets.py
    python benchmarks/torch_nets.py resnet18 timm/ hf/gpt2 --rows rows.jsonl

Small variants with random weights. Each net is given to QuantModel with one batch; columns: where its graph comes from,
how many of its products are quantized, whether the model with quantizers off is the float model (2e-4 of the largest
output), one training step with finite gradients, the exported file beside torch, and whether the plan applies to the
float file as onnxslim rewrites it. Sums in another order round some values to the next integer, so a file is torch's
model within one twentieth of the largest output or, in nets where such a step grows, within twice what changing the
sums of all layers by 1e-6 does. A net that fails says why. Names are beginnings; --rows keeps one line of JSON a net,
and goes on behind those it has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from measure import table
from torch_frontend.export import Exported, to_onnx
from torch_frontend.quant_model import QuantModel

R = TypeVar("R")
# Makers of a net and its inputs, by name.
Nets = dict[str, Callable[[], tuple[nn.Module, Any]]]
# Name, and side of the image.
VISION = {
    "alexnet": 64, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64,
    "googlenet": 64, "inception_v3": 96, "maxvit_t": 224, "mnasnet0_5": 64, "mobilenet_v2": 64,
    "mobilenet_v3_small": 64, "regnet_x_400mf": 64, "regnet_y_400mf": 64, "resnet18": 64, "resnet50": 64,
    "resnext50_32x4d": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "swin_t": 64, "swin_v2_t": 64, "vgg11_bn": 32,
    "vit_b_16": 224, "wide_resnet50_2": 64,
}  # fmt: skip
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
TIMM = {
    "beit_base_patch16_224": 224, "cait_xxs24_224": 224, "coat_tiny": 224, "coatnet_nano_rw_224": 224,
    "convmixer_768_32": 64, "convnextv2_atto": 64, "crossvit_tiny_240": 240, "cspresnet50": 64, "davit_tiny": 64,
    "deit_tiny_patch16_224": 224, "dla34": 64, "edgenext_xx_small": 64, "efficientformerv2_s0": 224,
    "efficientvit_b0": 64, "eva02_tiny_patch14_224": 224, "fastvit_t8": 64, "focalnet_tiny_srf": 64,
    "gcvit_xxtiny": 224,
    "ghostnet_100": 64, "hardcorenas_a": 64, "hgnetv2_b0": 64, "hrnet_w18_small": 64, "inception_next_tiny": 64,
    "lcnet_050": 64, "levit_128s": 224, "mixer_s32_224": 224, "mobilenetv4_conv_small": 64, "mobileone_s0": 64,
    "mobilevit_xxs": 64, "mobilevitv2_050": 64, "nfnet_l0": 64, "pit_ti_224": 224, "poolformer_s12": 64, "pvt_v2_b0":
    64,
    "repvgg_a0": 64, "res2net50_26w_4s": 64, "resmlp_12_224": 224, "rexnet_100": 64,
    "swin_tiny_patch4_window7_224": 224,
    "tiny_vit_5m_224": 224, "tinynet_e": 64, "visformer_tiny": 224, "xcit_nano_12_p16_224": 224,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
IDS, MASK = torch.arange(24).reshape(2, 12) % 97 + 2, torch.ones(2, 12, dtype=torch.long)


@dataclass
class Row:
    """A net's line of the table. captured: torch.fx, torch.export or layers. reason: of the last, and of failures."""

    net: str
    captured: str = "-"
    quantized: str = "-"
    same: str = "-"
    trains: str = "-"
    exported: str = "-"
    again: str = "-"
    seconds: float = 0.0
    reason: str = ""


def list_nets() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, Any]]]]:
    """(name, maker of the net and its inputs) of all nets of the packages that are installed."""
    if find_spec("torchvision"):
        for name, side in VISION.items():
            yield f"torchvision/{name}", lambda name=name, side=side: _make_vision(name, side)
        for name in SEGMENTATION:
            yield f"torchvision/{name}", lambda name=name: _make_vision(name, 64)
    if find_spec("timm"):
        for name, side in TIMM.items():
            yield f"timm/{name}", lambda name=name, side=side: _make_timm(name, side)
    if find_spec("transformers"):
        yield from ((f"hf/{name}", make) for name, make in _list_transformers().items())


def _make_vision(name: str, side: int) -> tuple[nn.Module, Any]:
    import torchvision

    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name in SEGMENTATION:
        options = {"weights_backbone": None}
    net = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
    return net, torch.randn(2, 3, side, side)


def _make_timm(name: str, side: int) -> tuple[nn.Module, Any]:
    import timm

    net = timm.create_model(name, pretrained=False, num_classes=10)
    return net, torch.randn(2, 3, side, side)


def _list_transformers() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    import transformers as hf

    text = {"input_ids": IDS, "attention_mask": MASK}
    images = {"pixel_values": torch.randn(2, 3, 32, 32)}
    vision = {"image_size": 32, "patch_size": 8}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    bart = {
        "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "vocab_size": 100,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 0,
    }  # fmt: skip
    clip = {key: SMALL[key] for key in SMALL if key != "vocab_size"}
    t5 = {
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 2,
        "d_ff": 128,
        "d_kv": 32,
        "vocab_size": 100,
    }
    small_kv = {**SMALL, **special, "num_key_value_heads": 1}
    found: dict[str, tuple[str, Any, str, Any]] = {
        "bert": ("BertConfig", SMALL, "BertForSequenceClassification", text),
        "roberta": ("RobertaConfig", {**SMALL, **special}, "RobertaForMaskedLM", text),
        "distilbert": (
            "DistilBertConfig", {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128, "vocab_size": 100},
            "DistilBertForQuestionAnswering", text,
        ),
        "gpt2": (
            "GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, **special}, "GPT2LMHeadModel",
            text,
        ),
        "llama": ("LlamaConfig", small_kv, "LlamaForCausalLM", text),
        "qwen2": ("Qwen2Config", small_kv, "Qwen2ForCausalLM", text),
        "opt": (
            "OPTConfig", {**SMALL, **special, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
            "OPTForCausalLM", text,
        ),
        "t5": ("T5Config", t5, "T5ForConditionalGeneration", {**text, "decoder_input_ids": IDS}),
        "bart": ("BartConfig", {**bart, **special}, "BartForConditionalGeneration", {**text, "decoder_input_ids": IDS}),
        "vit": ("ViTConfig", {**clip, **vision}, "ViTForImageClassification", images),
        "deit": ("DeiTConfig", {**clip, **vision}, "DeiTForImageClassification", images),
        "clip": (
            "CLIPConfig",
            {"text_config": {**SMALL, "eos_token_id": 1}, "vision_config": {**clip, **vision}, "projection_dim": 32},
            "CLIPModel", {**text, **images},
        ),
    }  # fmt: skip

    def make(config: str, values: Any, model: str, inputs: Any) -> tuple[nn.Module, Any]:
        return getattr(hf, model)(getattr(hf, config)(**values)), inputs

    return {name: (lambda entry=entry: make(*entry)) for name, entry in found.items()}


def measure_net(name: str, make: Callable[[], tuple[nn.Module, Any]]) -> Row:
    """The row of a net."""
    row, began = Row(name), time.perf_counter()
    try:
        torch.manual_seed(0)
        net, inputs = make()
        _fill_row(row, net.eval(), inputs)
    except Exception as error:  # a net that fails is a row, not the end
        row.reason = row.reason or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    row.seconds = round(time.perf_counter() - began, 1)
    return row


def _fill_row(row: Row, net: nn.Module, inputs: Any) -> None:
    # `virtual`: no engine's costs, by which most of such small nets would stay float.
    model = QuantModel(net, target="virtual", example_inputs=inputs)
    row.captured = model.origin.value
    row.reason = "; ".join(
        dict.fromkeys(
            f"{one.subject}: {one.reason}" for one in model.refusals if one.code == "R108"
        )
    )
    quantized = [product for product in model.products if product.reason is None]
    row.quantized = f"{len(quantized)} of {len(model.products)}"
    with torch.no_grad():
        row.same = _compare(_run(net, inputs), _run(model, inputs), 2e-4)
    model.prepare_calibration()
    with torch.no_grad():
        _run(model, inputs)
    model.calc_qparams().init_qat()
    row.trains = _train_step(model, inputs)
    exported = to_onnx(model.freeze(), inputs)
    with torch.no_grad():
        said, made = _run(model, inputs), _run_file(exported, inputs)
        row.exported = _compare(said, made, 5e-2)
        if row.exported != "yes":
            _judge_chaos(row, model, inputs, _run(net, inputs), made)
    row.again = apply_slimmed(exported, inputs)


def _run(model: nn.Module, inputs: Any) -> list[Tensor]:
    result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _compare(expected: list[Tensor], got: list[Tensor], tolerance: float) -> str:
    """yes, or the largest difference in parts of the largest value."""
    worst = _part(expected, got)
    return "yes" if worst <= tolerance else f"{worst:.1e}"


def _part(expected: list[Tensor], got: list[Tensor]) -> float:
    parts = [
        float((a - b).abs().max() / a.abs().max().clamp_min(1e-9))
        for a, b in zip(expected, got, strict=False)
    ]
    return max(parts, default=float("nan"))


def _judge_chaos(
    row: Row, model: QuantModel, inputs: Any, plain: list[Tensor], made: list[Tensor]
) -> None:
    """yes for a file that is no farther from torch than twice what changing the sums of all layers by 1e-6 does."""
    rng, said = torch.Generator().manual_seed(1), _run(model, inputs)

    def nudge_sums(_module: nn.Module, _inputs: Any, sums: Tensor) -> Tensor:
        return sums * (1 + 1e-6 * torch.randn(sums.shape, generator=rng))

    layers = [
        module
        for path, module in model.model.named_modules()
        if path and "weight" in module._parameters
    ]
    handles = [layer.register_forward_hook(nudge_sums) for layer in layers]
    change = max(_part(said, _run(model, inputs)) for _ in range(3))
    for handle in handles:
        handle.remove()
    file, rounding = _part(said, made), _part(plain, said)
    row.exported = "yes" if file <= 2 * change else row.exported
    row.reason += "; " * bool(row.reason) + (
        f"the file is {file:.1%} from torch; sums of layers changed by 1e-6 change torch's outputs by {change:.1%}, "
        f"quantization by {rounding:.0%}"
    )


def _train_step(model: QuantModel, inputs: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sum(value.float().square().mean() for value in _run(model, inputs)).backward()  # type: ignore[union-attr]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    return (
        "yes"
        if gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)
        else "not finite"
    )


def _run_file(exported: Exported, inputs: Any) -> list[Tensor]:
    """Outputs of the exported file as it says, without optimizations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(exported.model.SerializeToString(), options)
    values = inputs if isinstance(inputs, dict) else {session.get_inputs()[0].name: inputs}
    feeds = {one.name: values[one.name].numpy() for one in session.get_inputs()}
    found = session.run(None, feeds)
    return [
        torch.from_numpy(value)
        for value in found
        if isinstance(value, np.ndarray) and value.dtype.kind == "f"
    ]


def apply_slimmed(exported: Exported, inputs: Any) -> str:
    """yes if the plan applies to the float file as onnxslim rewrites it, with all of its pairs; else the reason."""
    if not find_spec("onnxslim"):
        return "-"
    import onnxslim

    import onnxq

    try:
        slim = onnxslim.slim(exported.float_model)
        done = onnxq.apply(slim, exported.plan)
    except onnxq.OnnxqError as error:  # a plan that does not apply is a result
        return f"refused: `{error.subject}`"
    pairs = [
        sum(node.op_type == "QuantizeLinear" for node in one.graph.node)
        for one in (exported.model, done.model)
    ]
    return "yes" if pairs[0] == pairs[1] else f"{pairs[1]} of {pairs[0]} pairs"


def print_table(rows: list[Row]) -> None:
    """The table, and below it the reasons and the share of nets with a graph."""
    columns = (
        "net",
        "captured by",
        "quantized",
        "off = float",
        "trains",
        "file = torch",
        "plan after onnxslim",
        "s",
    )
    print(
        table([[str(value) for value in list(asdict(row).values())[:-1]] for row in rows], columns)
    )
    for row in rows:
        if row.reason:
            print(f"\n- `{row.net}`: {row.reason}")
    graphs = sum(row.captured in ("torch.fx", "torch.export") for row in rows)
    print(f"\n{graphs} of {len(rows)} captured as a graph; {describe_versions()}")


def describe_versions() -> str:
    """The packages that the figures hold for."""
    return ", ".join(
        f"{name} {version(name)}"
        for name in ("torch", "torchvision", "timm", "transformers")
        if find_spec(name)
    )


def choose_nets(names: Sequence[str]) -> Nets:
    """Those whose names, with or without that of the family, have one of these beginnings; all for none."""
    beginnings = tuple(names) or ("",)
    return {
        name: make for name, make in list_nets()
        if any(part.startswith(beginnings) for part in (name, name.partition("/")[2]))
    }  # fmt: skip


def measure_nets(
    nets: Nets, kind: type[R], measure: Callable[..., R], path: Path | None
) -> list[R]:
    """A row for each net, in the order of all, behind the rows that a file has, which keeps the new ones too.

    kind: a dataclass of rows, with the name of the net as `net`. measure: makes one of a name and a maker.
    """
    lines = path.read_text().splitlines() if path and path.exists() else []
    rows = {row.net: row for row in (kind(**json.loads(line)) for line in lines)}
    for name, make in nets.items():
        if name in rows:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[name] = measure(name, make)
        print(rows[name], file=sys.stderr, flush=True)
        if path:
            with path.open("a") as file:
                file.write(json.dumps(asdict(rows[name])) + "\n")
    places = {name: k for k, (name, _) in enumerate(list_nets())}
    return sorted(rows.values(), key=lambda row: places.get(row.net, len(places)))


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser of the names of nets and the file of rows. text: of the help."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="beginnings of names, of the family too; none: all nets"
    )
    parser.add_argument("--rows", type=Path, help="file of rows, one line of JSON each")
    parser.add_argument("--list", action="store_true", help="name the nets and end")
    return parser


def parse_names(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The options; with --list the program ends here."""
    options = parser.parse_args(arguments)
    if options.list:
        print(*choose_nets(options.names), sep="\n")
        sys.exit()
    return options


def main(arguments: list[str]) -> None:
    """Measure the nets asked for and print their table."""
    options = parse_names(make_parser(__doc__), arguments)
    print_table(measure_nets(choose_nets(options.names), Row, measure_net, options.rows))


if __name__ == "__main__":
    main(sys.argv[1:])
