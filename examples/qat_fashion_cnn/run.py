#!/usr/bin/env python3
"""Train a small CNN on Fashion-MNIST, quantize it to few bits by every method, and compare the exports in ONNX Runtime.

    pip install "onnxq[cpu,torch]"            # Debian: apt install dataset-fashion-mnist, else it is downloaded
    python examples/qat_fashion_cnn/run.py    # about half an hour on two cores; --quick takes a tenth of everything

Every row is the exported ONNX file, run by ONNX Runtime as the file says, on the 10 000 test images. First and last
layer keep 8 bits, as in the papers.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from data import Images, load
from net import FashionNet, train, varied
from onnxq import qat
from onnxq.runtime import Session
from torch_frontend.export import export_onnx
from torch_frontend.quant_model import QuantModel
from torch_frontend.reconstruct import Settings, reconstruct

CALIBRATION, RECONSTRUCTION = 512, 1024


@dataclass(frozen=True)
class Method:
    """How a model gets its numbers. weights, activations: quantizers; epochs of training, or a reconstruction."""

    name: str
    weights: str = "uniform"
    activations: str = "uniform"
    trained: bool = False
    reconstruction: str = ""
    qdrop: float = 0.0
    lr: float = 0.01


PTQ = Method("PTQ, nearest, MSE ranges")
METHODS = (
    PTQ,
    Method("AdaRound", reconstruction="adaround"),
    Method("BRECQ + QDrop", reconstruction="brecq", qdrop=0.5),
    Method("QAT, LSQ", "lsq", "lsq", trained=True),
    Method("QAT, LSQ+", "lsq+", "lsq+", trained=True),
    Method("QAT, PACT (weights LSQ)", "lsq", "pact", trained=True),
    Method("QAT, DoReFa", "dorefa", "dorefa", trained=True),
)
WIDTHS = ((4, 8), (4, 4), (2, 4))
TRAINED_WIDTHS = ((4, 4), (2, 4))  # where rounding alone is not enough


def configuration(method: Method, weight_bits: int, activation_bits: int) -> dict[str, Any]:
    """The keys of a configuration file; first and last layer at 8 bits, with plain learned or fixed scales."""
    # At 8 bits there is little to learn, and the smallest scales suffer most from a step too far.
    plain = {"quantizer": "uniform", "bits": 8}
    return {
        "target": "virtual",
        "weights": {
            "bits": weight_bits,
            "scheme": "symmetric",
            "granularity": "channel",
            "observer": "mse",
        },
        "activations": {"bits": activation_bits, "scheme": "asymmetric", "observer": "mse"},
        "rules": [
            {"node": ["stem.0", "head"], "role": "weight", "set": plain},
            {"tensor": "input:*", "set": plain},
            {"node": "head", "role": "activation", "set": plain},
        ],
        "torch": {
            "weights": {"quantizer": method.weights},
            "activations": {"quantizer": method.activations},
        },
    }


def quantized(
    net: nn.Module, method: Method, bits: tuple[int, int], images: Images, args: argparse.Namespace
) -> Any:
    """A calibrated model with its numbers learned by the method."""
    torch.manual_seed(args.seed)
    few = images.take(CALIBRATION)
    model = QuantModel(net, configuration(method, *bits), example_inputs=few.images[:2]).eval()
    with qat.observing(model):
        for x, _ in few.batches(64):
            model(x)
    model.set_quant()
    if method.reconstruction:
        settings = Settings(iterations=args.iterations, samples=RECONSTRUCTION)
        held = [(x,) for x, _ in images.take(RECONSTRUCTION).batches(64)]
        reconstruct(model, held, method.reconstruction, qdrop=method.qdrop, settings=settings)
    if method.trained:
        tuned(model, net, method, images, args)
    return model.freeze()


def tuned(
    model: QuantModel, teacher: nn.Module, method: Method, images: Images, args: argparse.Namespace
) -> None:
    """Quantization-aware training, with the float model as teacher."""
    generator = torch.Generator().manual_seed(args.seed)
    steps = args.epochs * -(-len(images) // 128)
    model.init_qat()
    groups = qat.parameter_groups(model, lr=method.lr, weight_decay=1e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    pacer = qat.Pacer(model, qat.Schedule(freeze_batch_norms=steps // 2))
    pacer.attach(optimizer)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    distiller = qat.Distiller(teacher, alpha=0.5)
    for _ in range(args.epochs):
        model.train()
        for x, label in images.batches(128, generator):
            pacer.step()
            x = varied(x, generator)
            said = model(x)
            loss = distiller.loss(
                said, distiller.answers(x), F.cross_entropy(said, label)
            ) + qat.penalty(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()


def accuracy(run: Callable[[torch.Tensor], torch.Tensor], images: Images) -> float:
    """Share of right answers in percent."""
    with torch.no_grad():
        return (
            100
            * sum(int((run(x).argmax(1) == label).sum()) for x, label in images.batches(500))
            / len(images)
        )


def in_onnxruntime(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The exported file, computed as it says."""
    session = Session(path, optimize=False)
    name = session.inputs[0].name
    return lambda x: torch.from_numpy(next(iter(session.run({name: x.numpy()}).values())))


def float_net(images: Images, args: argparse.Namespace) -> nn.Module:
    """The trained float network; kept in the output folder."""
    torch.manual_seed(args.seed)
    net, kept = FashionNet(), args.out / f"float-{args.float_epochs}-{args.images}.pt"
    if kept.is_file():
        net.load_state_dict(torch.load(kept, weights_only=True))
        return net.eval()
    train(net, images, epochs=args.float_epochs, lr=0.1, seed=args.seed)
    torch.save(net.state_dict(), kept)
    return net.eval()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/qat_fashion_cnn"))
    parser.add_argument(
        "--epochs", type=int, default=2, help="of each training of a quantized model"
    )
    parser.add_argument("--float-epochs", type=int, default=8)
    parser.add_argument(
        "--iterations", type=int, default=1000, help="of each unit of a reconstruction"
    )
    parser.add_argument("--images", type=int, default=60_000, help="training images")
    parser.add_argument("--methods", nargs="*", default=[method.name for method in METHODS])
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, to see it run")
    args = parser.parse_args()
    if args.quick:
        args.epochs, args.float_epochs, args.images, args.iterations = 1, 2, 6_000, 200
    return args


def main() -> None:
    """Every method at every width; the table goes to the output folder too."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    images, test = load("train").take(args.images), load("test")
    net = float_net(images, args)
    heads = [f"W{w}A{a}" for w, a in WIDTHS]
    lines = [
        f"| float {accuracy(net, test):.2f} | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(heads)}",
    ]
    for method in (method for method in METHODS if method.name in args.methods):
        cells = []
        for bits in WIDTHS:
            if method.trained and bits not in TRAINED_WIDTHS:
                cells.append("")
                continue
            start = time.perf_counter()
            model = quantized(copy.deepcopy(net), method, bits, images, args)
            path = (
                args.out
                / f"{method.name.split(' (')[0].replace(' ', '-')}-w{bits[0]}a{bits[1]}.onnx".lower()
            )
            export_onnx(model, path, images.images[:2], dynamic_batch=True, force=True)
            cells.append(f"{accuracy(in_onnxruntime(path), test):.2f}")
            print(f"{method.name}, W{bits[0]}A{bits[1]}: {cells[-1]} in ONNX Runtime, "
                  f"{accuracy(model, test):.2f} in torch, {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
        lines.append(f"| {method.name} | {' | '.join(cells)} |")
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
