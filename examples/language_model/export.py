#!/usr/bin/env python3
"""Write the trained decoder as ONNX: one float file that takes a prompt, or single bytes after cached keys and values.

    python examples/language_model/export.py --out language_model_out     # model.pt -> model.onnx

Inputs and outputs are named as exporters of decoders name them: input_ids, attention_mask, position_ids,
past_key_values.N.key and .value; logits, present.N.key and .value.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from net import ByteDecoder, Shape


class FlatDecoder(nn.Module):
    """The decoder with its cache as one list of tensors: key and value of the first layer, of the second …"""

    def __init__(self, net: ByteDecoder) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        pairs = list(zip(past[::2], past[1::2], strict=True))
        logits, presents = self.net(input_ids, attention_mask, position_ids, pairs)
        return (logits, *(tensor for pair in presents for tensor in pair))


def load_checkpoint(file: Path) -> ByteDecoder:
    """Read a checkpoint of train.py."""
    found = torch.load(file, weights_only=True)
    net = ByteDecoder(Shape(**found["shape"]))
    net.load_state_dict(found["weights"])
    return net.eval()


def export_decoder(net: ByteDecoder, file: Path) -> Path:
    """Write the float file."""
    shape = net.shape
    batch, length, cached = 2, 3, 5
    kept = (batch, shape.kept, cached, shape.size)
    example = (
        torch.zeros(batch, length, dtype=torch.int64),
        torch.ones(batch, cached + length, dtype=torch.int64),
        torch.arange(cached, cached + length).repeat(batch, 1),
        [torch.zeros(kept) for _ in range(2 * shape.layers)],
    )
    names = [f"{k}.{part}" for k in range(shape.layers) for part in ("key", "value")]
    rows, total, past = Dim("batch_size"), Dim("total_sequence_length"), Dim("past_sequence_length")
    ids = {0: rows, 1: Dim("sequence_length")}
    torch.onnx.export(
        FlatDecoder(net).eval(), example, file, dynamo=True, external_data=False, verbose=False, opset_version=21,
        input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)],
        output_names=["logits", *(f"present.{name}" for name in names)],
        dynamic_shapes=(ids, {0: rows, 1: total}, ids, [{0: rows, 2: past} for _ in names]),
    )  # fmt: skip
    return file


def main() -> None:
    """Export the latest checkpoint of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("language_model_out"), help="folder of train.py's files"
    )
    given = parser.parse_args()
    print(export_decoder(load_checkpoint(given.out / "model.pt"), given.out / "model.onnx"))


if __name__ == "__main__":
    main()
