"""OpenVINO's runtime graph as kernels, each with the nodes of the model that went into it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from onnxq.backends.engine import Kernel, Kernels, Tensor
from onnxq.sites import JsonObject

# The list of a build's layers, with the model's own names.
KERNELS = "kernels.json"
# A node's name in the model that is compiled: a number that no suffix of OpenVINO's can change.
MARK = re.compile(r"node\[(\d+)\]")
_MOVES = (
    "Reorder",
    "Reshape",
    "Transpose",
    "Convert",
    "Broadcast",
    "Split",
    "StridedSlice",
    "MemoryInput",
)
CONSTANT = "Const"
# Beside constants, the layers of the model's ends.
_ENDS = ("Input", "Output", CONSTANT)
_TYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "uint8",
    "i8": "int8",
    "i4": "int4",
    "u4": "uint4",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "boolean": "bool",
}


def mark_name(number: int) -> str:
    """The name of a node in the model that is compiled."""
    return f"node[{number}]"


def read_kernels(folder: Path) -> Kernels:
    """The layers of a build in the order they run, constants and ends aside."""
    listed = json.loads((folder / KERNELS).read_text(encoding="utf-8"))
    # In the order in which they run.
    layers = (row for row in listed["layers"] if row["kind"] not in _ENDS)
    return tuple(_read_layer(row, listed["nodes"], listed["outputs"]) for row in layers)


def _find_nodes(sources: str, names: list[str], outputs: Mapping[str, int]) -> Iterator[str]:
    """The model's nodes among the names that went into a layer."""
    for source in sources.split(","):
        found = MARK.search(source)
        # Parts of a node have its name and more.
        part = next(
            (
                k
                for name, k in outputs.items()
                if re.match(rf"{re.escape(name)}(?:/|_original|$)", source)
            ),
            None,
        )
        if found is not None:
            yield names[int(found[1])]
        elif part is not None:
            yield names[part]


def _read_layer(row: JsonObject, names: list[str], outputs: Mapping[str, int]) -> Kernel:
    return Kernel(
        name=MARK.sub(lambda found: names[int(found[1])], row["name"]),
        kind=row["kind"],
        nodes=tuple(dict.fromkeys(_find_nodes(row["sources"], names, outputs))),
        inputs=tuple(_read_tensor(entry) for entry in row["inputs"] if not entry["constant"]),
        weights=tuple(_read_tensor(entry) for entry in row["inputs"] if entry["constant"]),
        outputs=tuple(map(_read_tensor, row["outputs"])),
        tactic=row["primitive"],
        moves=row["kind"] in _MOVES,
    )


def _read_tensor(entry: JsonObject) -> Tensor:
    dtype = str(entry["dtype"])
    return Tensor(
        name=entry["name"],
        dtype=_TYPES.get(dtype, dtype),
        shape=tuple(entry["shape"]),
        layout=entry["layout"],
    )
