#!/usr/bin/env python3
"""Quantization-aware training beside Brevitas and torchao: accuracy over seeds, and milliseconds a step.

    pip install brevitas torchao                 # those that are installed take part
    python benchmarks/qat.py [--bits 4,4 2,4] [--seeds 3] [--epochs 1] [--images 60000] [--threads 2]

The small residual network of examples/qat_fashion_cnn, trained in float once, goes on from the same weights in every
tool: batches, order, changes of the images, loss (cross entropy), optimizer and rates are the same. All tools take a
step on a batch, in turns, before the next batch comes, so that their times are of the same minutes; `float` trains on
without quantization. Brevitas has hand-made layers with scales as parameters, and quantizers behind each ReLU; onnxq is
told to quantize the same tensors. torchao has its PT2E flow, which has no learned scales (ranges follow the data) and
also quantizes the inputs of additions. The first layer's weights and data and the last layer keep 8 bits.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import table

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "qat_fashion_cnn"
sys.path.insert(0, str(EXAMPLE))

from data import Images, load  # noqa: E402
from net import FashionNet, train, varied  # noqa: E402

CALIBRATION, BATCH, DECAY = 512, 128, 1e-4


@dataclass
class Contender:
    """A model in training. groups: of its parameters, with parts of the rate. finish_model: gives what is judged.

    before_step: is called before each step.
    """

    model: nn.Module
    groups: list[dict[str, Any]]
    finish_model: Callable[[], Callable[[Tensor], Tensor]]
    before_step: Callable[[], None] = lambda: None
    attach: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    milliseconds: list[float] = field(default_factory=list)


def group_parameters(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters of another tool's model in one group."""
    return [{"params": list(model.parameters()), "lr": 1.0, "weight_decay": DECAY}]


def prepare_float(net: nn.Module, bits: tuple[int, int], few: Images, steps: int) -> Contender:
    """The float network, trained on."""
    return Contender(net, group_parameters(net), net.eval)


def prepare_onnxq(net: nn.Module, bits: tuple[int, int], few: Images, steps: int) -> Contender:
    """QuantModel with LSQ; judged as the exported file in ONNX Runtime."""
    from onnxq import qat
    from onnxq.runtime import Session
    from torch_frontend.export import export_onnx
    from torch_frontend.quant_model import QuantModel

    plain = {"quantizer": "uniform", "bits": 8}
    config = {
        "target": "virtual",
        "weights": {
            "bits": bits[0],
            "scheme": "symmetric",
            "granularity": "channel",
            "observer": "mse",
        },
        "activations": {"bits": bits[1], "scheme": "asymmetric", "observer": "mse"},
        "rules": [
            {"node": ["stem.0", "head"], "role": "weight", "set": plain},
            {"tensor": "input:*", "set": plain},
            {"node": "head", "role": "activation", "set": plain},
            # Target virtual would quantize every tensor: here those that Brevitas's layers do, behind each ReLU.
            {
                "tensor": ["*stem.0.out", "*conv?.out", "*shortcut.0.out", "*add.out"],
                "set": {"float": True},
            },
        ],
        # Batch norms stay alive until the export, as in the other tools.
        "torch": {
            "weights": {"quantizer": "lsq"},
            "activations": {"quantizer": "lsq"},
            "fuse_bn": False,
        },
    }
    model = QuantModel(net, config, example_inputs=few.images[:2]).eval()
    with qat.observing(model):
        for x, _ in few.batches(64):
            model(x)
    model.init_qat()
    pacer = qat.Pacer(model, qat.Schedule(freeze_batch_norms=steps // 2))

    def finish_model() -> Callable[[Tensor], Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.onnx"
            export_onnx(model.freeze(), path, few.images[:2], dynamic_batch=True)
            session = Session(path, optimize=False)
        name = session.inputs[0].name
        return lambda x: torch.from_numpy(next(iter(session.run({name: x.numpy()}).values())))

    return Contender(
        model,
        qat.parameter_groups(model, lr=1.0, weight_decay=DECAY),
        finish_model,
        pacer.step,
        attach=pacer.attach,
    )


def prepare_brevitas(net: nn.Module, bits: tuple[int, int], few: Images, steps: int) -> Contender:
    """Layers of Brevitas in place of torch's, with the weights and batch norms of the net."""
    import brevitas.nn as qnn
    from brevitas.core.scaling import ScalingImplType
    from brevitas.graph.calibrate import calibration_mode
    from brevitas.quant.scaled_int import (
        Int8ActPerTensorFloat,
        Int8WeightPerChannelFloat,
        Uint8ActPerTensorFloat,
    )

    learned = {"scaling_impl_type": ScalingImplType.PARAMETER_FROM_STATS}

    def make_weight(width: int) -> type:
        return type("Weights", (Int8WeightPerChannelFloat,), {"bit_width": width, **learned})

    def replace_layers(module: nn.Module, path: str = "") -> None:
        for name, child in module.named_children():
            full, wide = f"{path}{name}", 8 if f"{path}{name}" in ("stem.0", "head") else bits[0]
            new: nn.Module | None = None
            if isinstance(child, nn.Conv2d):
                new = qnn.QuantConv2d(
                    child.in_channels, child.out_channels, child.kernel_size, child.stride, child.padding,  # type: ignore[arg-type]
                    bias=child.bias is not None, weight_quant=make_weight(wide),
                    input_quant=Int8ActPerTensorFloat if full == "stem.0" else None,
                )  # fmt: skip
            elif isinstance(child, nn.Linear):
                new = qnn.QuantLinear(
                    child.in_features, child.out_features, bias=True, weight_quant=make_weight(wide),
                    input_quant=Uint8ActPerTensorFloat,
                )  # fmt: skip
            elif isinstance(child, nn.ReLU):
                new = qnn.QuantReLU(
                    act_quant=type("Data", (Uint8ActPerTensorFloat,), {"bit_width": bits[1]})
                )
            if new is None:
                replace_layers(child, f"{full}.")
                continue
            new.load_state_dict(child.state_dict(), strict=False)
            setattr(module, name, new)

    split_relus(net)
    replace_layers(net)
    net.eval()
    with torch.no_grad(), calibration_mode(net):
        for x, _ in few.batches(64):
            net(x)
    return Contender(net, group_parameters(net), net.eval)


def split_relus(net: nn.Module) -> None:
    """A ReLU of its own for each place of a block: quantizers have state."""
    for block in net.blocks:  # type: ignore[union-attr]
        block.last = nn.ReLU()

        def forward(x: Tensor, block: Any = block) -> Tensor:
            y = block.relu(block.bn1(block.conv1(x)))
            return block.last(block.bn2(block.conv2(y)) + block.shortcut(x))

        block.forward = forward


def prepare_torchao(net: nn.Module, bits: tuple[int, int], few: Images, steps: int) -> Contender:
    """torchao's PT2E: exported, annotated, prepared for training."""
    import torchao.quantization.pt2e as pt2e
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    def make_config(weight: int, data: int) -> Any:
        return get_symmetric_quantization_config(
            is_per_channel=True, is_qat=True, act_qmin=-(2 ** (data - 1)), act_qmax=2 ** (data - 1) - 1,
            weight_qmin=-(2 ** (weight - 1)) + 1, weight_qmax=2 ** (weight - 1) - 1,
        )  # fmt: skip

    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(
        net.train(), (few.images[:4],), dynamic_shapes=(batch,), strict=True
    ).module()
    quantizer = XNNPACKQuantizer().set_global(make_config(*bits))
    for name in ("stem.0", "head"):
        quantizer.set_module_name(name, make_config(8, 8))
    model = prepare_qat_pt2e(exported, quantizer)
    pt2e.move_exported_model_to_train(model)

    def finish_model() -> Callable[[Tensor], Tensor]:
        model.apply(pt2e.disable_observer)
        pt2e.move_exported_model_to_eval(model)
        return model

    return Contender(model, group_parameters(model), finish_model)


TOOLS: dict[str, tuple[str, Callable[[nn.Module, tuple[int, int], Images, int], Contender]]] = {
    "float, trained on": ("torch", prepare_float),
    "onnxq, LSQ": ("onnxq", prepare_onnxq),
    "Brevitas, learned scales": ("brevitas", prepare_brevitas),
    "torchao PT2E": ("torchao", prepare_torchao),
}


def train_beside(
    contenders: list[Contender], images: Images, epochs: int, seed: int, lr: float
) -> None:
    """Train all on the same batches, a step of each in turns."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(images) // BATCH)
    made = []
    for one in contenders:
        groups = [{**group, "lr": lr * group["lr"]} for group in one.groups]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
        one.attach(optimizer)
        made.append((one, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)))
        if not isinstance(one.model, torch.fx.GraphModule):
            one.model.train()
    for _ in range(epochs):
        for x, label in images.batches(BATCH, generator):
            x = varied(x, generator)
            for one, optimizer, rates in made:
                start = time.perf_counter()
                one.before_step()
                loss = F.cross_entropy(one.model(x), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                rates.step()
                one.milliseconds.append(1e3 * (time.perf_counter() - start))


def measure_accuracy(run: Callable[[Tensor], Tensor], images: Images) -> float:
    """Share of right answers in percent."""
    with torch.no_grad():
        return (
            100
            * sum(int((run(x).argmax(1) == label).sum()) for x, label in images.batches(500))
            / len(images)
        )


def make_float(images: Images, epochs: int) -> nn.Module:
    """The float network; kept in the folder of temporary files, by what it was trained on."""
    kept = Path(tempfile.gettempdir()) / f"qat_fashion_float-{epochs}-{len(images)}.pt"
    torch.manual_seed(0)
    net = FashionNet()
    if kept.is_file():
        net.load_state_dict(torch.load(kept, weights_only=True))
        return net.eval()
    train(net, images, epochs=epochs, lr=0.1, seed=0)
    torch.save(net.state_dict(), kept)
    return net.eval()


def compare_tools(
    net: nn.Module, bits: tuple[int, int], images: Images, test: Images, args: argparse.Namespace
) -> None:
    """Print the table of one pair of widths."""
    names = [name for name, (package, _) in TOOLS.items() if find_spec(package)]
    scores: dict[str, list[float]] = {name: [] for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    steps = args.epochs * -(-len(images) // BATCH)
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        contenders = {
            name: TOOLS[name][1](copy.deepcopy(net), bits, images.take(CALIBRATION), steps)
            for name in names
        }
        train_beside(list(contenders.values()), images, args.epochs, seed, args.lr)
        for name, one in contenders.items():
            scores[name].append(measure_accuracy(one.finish_model(), test))
            times[name] += one.milliseconds
            print(
                f"W{bits[0]}A{bits[1]}, seed {seed}: {name} {scores[name][-1]:.2f}",
                file=sys.stderr,
                flush=True,
            )
    plain = statistics.median(times[names[0]])
    rows = []
    for name in names:
        spread = statistics.stdev(scores[name]) if args.seeds > 1 else 0.0
        median = statistics.median(times[name])
        rows.append([
            name, f"{statistics.mean(scores[name]):.2f} ± {spread:.2f}", " ".join(f"{one:.2f}" for one in scores[name]),
            f"{median:.1f}", f"{median / plain:.2f}",
        ])  # fmt: skip
    heads = (f"W{bits[0]}A{bits[1]}", "accuracy, %", "by seed", "ms a step", "× float")
    print(table(rows, heads), flush=True)


def main(arguments: list[str]) -> None:
    """Train, judge, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bits", nargs="+", default=["4,4", "2,4"], help="pairs of weight and activation bits"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=1, help="of each training of a quantized model"
    )
    parser.add_argument("--float-epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=60_000, help="training images")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    images, test = load("train").take(args.images), load("test")
    net = make_float(images, args.float_epochs)
    packages = [name for name in ("torch", "brevitas", "torchao") if find_spec(name)]
    print(
        f"float {measure_accuracy(net, test):.2f} %; {len(images)} images, {args.epochs} epoch(s), batches of {BATCH}, "
        f"{torch.get_num_threads()} threads; {', '.join(f'{name} {version(name)}' for name in packages)}\n"
    )
    for pair in args.bits:
        weight, _, data = pair.partition(",")
        compare_tools(net, (int(weight), int(data)), images, test, args)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
