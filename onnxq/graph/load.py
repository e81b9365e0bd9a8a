"""Reading a model: from an untrusted file to a checked ModelProto, with its weights or with stubs for them."""

import mmap
import os
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import IR_VERSION, ModelProto, TensorProto, checker, defs, helper

from onnxq.errors import ModelError, suggest_files
from onnxq.files import check_input_kind, explain_unreadable, read_input
from onnxq.graph import light
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.graph.index import find_opset
from onnxq.graph.light import LightModel, WeightStore, measure_size, strip_weights
from onnxq.graph.scopes import (
    OWN_DOMAINS,
    declare_opset,
    drop_named,
    label_node,
    map_stored,
    replace_items,
    sort_nodes,
    walk_all_nodes,
    walk_graphs,
    walk_nodes,
)
from onnxq.graph.shapes import set_contrib_apart
from onnxq.graph.skeleton import MESSAGE_LIMIT, read_skeleton
from onnxq.graph.storage import (
    Extent,
    OpenFile,
    ReadBytes,
    StoredArray,
    check_tensors,
    count_tensor_bytes,
    is_external,
    load_external,
    omit_weights,
    open_data,
    walk_tensors,
)
from onnxq.sites import Caution, Cautions
from onnxq.wording import join_names

# From IR version 4 on an initializer need not be a graph input as well.
PLAIN_INITIALIZERS_IR = 4
# Names listed in a note.
_SHOWN = 5
# A model's path, or the model.
ModelSource = str | Path | ModelProto


@dataclass(frozen=True, eq=False)
class Model:
    """A model read from a file (or copied from a ModelProto).

    proto: whole, or with stubs for large weights, whose arrays are in `weights` and stay in their files.
    path: None for a ModelProto. size_bytes: the file and its external data. notes: changes made while reading, one
    sentence each. files: those that were read.
    """

    proto: ModelProto
    path: Path | None
    size_bytes: int
    notes: Cautions = ()
    files: tuple[Path, ...] = ()
    weights: WeightStore | None = None

    @property
    def external(self) -> bool:
        """True for a model with external data."""
        return len(self.files) > 1

    @property
    def light(self) -> LightModel:
        """The model with stubs for its large weights."""
        return strip_weights(
            self.proto if self.weights is None else LightModel(self.proto, self.weights)
        )


def load_model(source: ModelSource, *, lazy: bool = False, attribute: str = "") -> Model:
    """Read and check a model; a ModelProto is copied. Never writes.

    lazy: leave large weights in their files, which are read when somebody asks for one. attribute: see
    `check_structure`.

    Initializers that are graph inputs too become plain ones, nodes that stand before their producers are sorted, each
    domain is imported once, and an opset older than an operator of the model is raised where that changes nothing else,
    with a note each.
    Raises ModelError for anything missing, damaged, unsafe or not supported.
    """
    files: tuple[Path, ...] = ()
    store = None
    if isinstance(source, ModelProto):
        proto = deepcopy(source)
        path = None
        subject = "the model"
        for tensor in filter(is_external, walk_tensors(proto)):
            cause = "its data lies in another file, which a ModelProto cannot find"
            raise ModelError(f"tensor {tensor.name!r}", cause, "give the path", code="Q106")
        # Below, once its tensors are known to be of types that have one.
        size = 0
    elif not isinstance(source, (str, os.PathLike)):
        fix = "give a path or an onnx.ModelProto (`.model_proto` of what torch.onnx.export returns)"
        raise ModelError("the model", f"is of type {type(source).__name__}", fix, code="Q101")
    else:
        path = Path(source)
        subject = str(path)
        if lazy:
            proto, store, read = _read_lazily(path)
        else:
            proto = _parse_model(_read_file(path), path)
            read = load_external(proto, path)
        size = path.stat().st_size + sum(read.values())
        files = (path, *read)
    # Before the checker, which refuses nodes out of order, domains that are not imported, and a key twice.
    imports = _settle_imports(proto)
    # Of two entries of one key ORT takes the last.
    replace_items(
        proto.metadata_props, {entry.key: entry for entry in proto.metadata_props}.values()
    )
    _check_versions(proto, subject)
    check_tensors(proto, subject)
    _check_inputs(proto)
    _check_types(proto, subject)
    notes = (
        *imports,
        *_separate_initializers(proto),
        *_sort_graphs(proto),
        *_raise_opset(proto, subject),
    )
    check_structure(proto, subject, attribute)
    return Model(proto, path, size or measure_size(proto), notes, files, store)


def check_structure(proto: ModelProto, subject: str, attribute: str = "") -> None:
    """onnx.checker on the model without its weights (so that size is no matter). Raises ModelError.

    attribute: one that QuantizeLinear and DequantizeLinear may have, though ONNX has no such attribute.
    """
    light, _ = omit_weights(proto, empty=True)
    for node in walk_all_nodes(light) if attribute else ():
        if node.op_type in (QUANTIZE, DEQUANTIZE):
            drop_named(node.attribute, [attribute])
    # Operators of ONNX Runtime's own in ONNX's domain, as SimplifiedLayerNormalization, are none
    # that onnx.checker knows.
    set_contrib_apart(light)
    _declare_unknown(light)
    try:
        checker.check_model(light)
    except (checker.ValidationError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = next((line for line in lines[1:] if line.startswith("==> Context")), "")
        cause = f"{lines[0] if lines else error}{f' ({where[4:]})' if where else ''}"
        # Operators whose meaning a later opset corrected, such as GroupNormalization.
        fix = "export it at another opset" if " is deprecated in " in cause else "export it again"
        raise ModelError(
            subject, f"is not a valid ONNX model: {cause}", fix, code="Q103"
        ) from error


def _declare_unknown(light: ModelProto) -> None:
    """Write a shape, and for outputs a type, where none is declared.

    onnx.checker demands them; ORT does without, and so does everything here. The checker looks no further at either.
    """
    for value in light.graph.output:
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for value in (*light.graph.input, *light.graph.output):
        inner = value.type
        while (kind := inner.WhichOneof("value")) in ("sequence_type", "optional_type"):
            inner = getattr(inner, kind).elem_type
        if kind == "tensor_type" and not inner.tensor_type.HasField("shape"):
            inner.tensor_type.shape.SetInParent()


def _check_inputs(proto: ModelProto) -> None:
    """Raise ModelError naming an input without a type: ORT takes a model without a shape, but not without that.

    Or one that a node writes too, as PyTorch exports an input that was named like an operator.
    """
    written = {name for node in proto.graph.node for name in node.output}
    for value in proto.graph.input:
        if value.name in written:
            raise ModelError(
                f"input {value.name!r}",
                "has the name of a tensor that a node writes",
                "give the input another name in the export",
                code="Q103",
            )
        kind = value.type.WhichOneof("value")
        if kind in (None, "tensor_type") and not value.type.tensor_type.elem_type:
            fix = "declare its element type, or export it again"
            raise ModelError(f"input {value.name!r}", "has no type", fix, code="Q103")


def _read_file(path: Path) -> bytes:
    try:
        return _read_bytes(path)
    except OSError as error:
        cause = explain_unreadable(error)
        raise ModelError(str(path), cause, "check its permissions", code="Q101") from error


def _read_bytes(path: Path) -> bytes:
    if os.path.isdir(path):
        inside = sorted(file.name for file in path.glob("*.onnx"))
        fix = f"name a file in it: {', '.join(inside[:_SHOWN])}" if inside else "name a file"
        raise ModelError(path, "is a folder, not a model", fix, code="Q101")
    if not os.path.exists(path):
        fix = suggest_files(path) or "check the path"
        raise ModelError(path, "there is no such file", fix, code="Q101")
    if path.stat().st_size > MESSAGE_LIMIT:
        cause = "is one file of over 2 GB: protobuf cannot read it"
        raise ModelError(path, cause, "save it with external data", code="Q101")
    data = read_input(path, ModelError, limit=MESSAGE_LIMIT)
    if not data:
        raise ModelError(path, "is empty", "copy or export it again", code="Q102")
    return data


# Files that are often given in place of a model: offset and first bytes, cause, fix.
_IMPOSTORS = (
    (
        0,
        b"version https://git-lfs",
        "is a Git LFS pointer, not the model itself",
        "run: git lfs pull",
    ),
    (
        4,
        b"ORTM",
        "is an ORT-format model, which cannot be edited",
        "give the .onnx it was made from",
    ),
    (
        0,
        b"PK\x03\x04",
        "is a zip archive (a PyTorch checkpoint, perhaps)",
        "export the network to ONNX first",
    ),
    (
        0,
        b"\x80\x04",
        "is a Python pickle (PPQ's .native, perhaps)",
        "export the network from the tool to ONNX first",
    ),
    (0, (b"<!DOCTYPE", b"<html"), "is a web page, not a model", "download the file itself"),
)


def _parse_model(data: bytes, path: Path) -> ModelProto:
    for offset, magic, cause, fix in _IMPOSTORS:
        if data.startswith(magic, offset):
            raise ModelError(path, cause, fix, code="Q102")
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf does not say which of its errors it may be
        cause = "is truncated, damaged or not an ONNX model (protobuf cannot read it)"
        raise ModelError(path, cause, "copy or export it again", code="Q102") from error
    if (
        # protobuf takes what it does not know for unknown fields, and so reads other messages.
        not proto.ir_version or not (proto.graph.node or proto.graph.output)
    ):
        cause = "is a protobuf file but not an ONNX model"
        raise ModelError(path, cause, "give the .onnx of the network", code="Q102")
    _check_text(proto, str(path))
    return proto


def _check_text(proto: ModelProto, subject: str) -> None:
    """protobuf reads names that are not UTF-8 as bytes, which nothing after it expects."""
    waiting = [proto]
    while waiting:
        message = waiting.pop()
        if isinstance(message, TensorProto):
            # Not its other fields: to list them is to copy the weights.
            waiting.extend((*message.external_data, *message.metadata_props))
            texts = [message.name, message.doc_string]
        else:
            texts = []
            for descriptor, value in message.ListFields():
                values = value if hasattr(value, "extend") else (value,)
                if descriptor.type == descriptor.TYPE_STRING:
                    texts.extend(values)
                elif descriptor.type == descriptor.TYPE_MESSAGE:
                    waiting.extend(values)
        if not all(isinstance(text, str) for text in texts):
            cause = "is damaged: a name in it is not text (UTF-8)"
            raise ModelError(subject, cause, "copy or export it again", code="Q102")


def _check_versions(proto: ModelProto, subject: str) -> None:
    newest = defs.onnx_opset_version()
    mine = f"newer than the installed onnx {onnx.__version__} knows"
    fix = "pip install --upgrade onnx onnxruntime"
    if proto.ir_version > IR_VERSION:
        raise ModelError(subject, f"has IR version {proto.ir_version}, {mine}", fix, code="Q104")
    if proto.ir_version < 3 or not proto.opset_import:
        cause = "is from before opsets (IR version below 3)"
        raise ModelError(subject, cause, "export it again with a newer tool", code="Q104")
    if find_opset(proto) > newest:
        raise ModelError(
            subject, f"uses opset {find_opset(proto)}, {mine} ({newest})", fix, code="Q104"
        )


def _check_types(proto: ModelProto, subject: str) -> None:
    """onnx.checker lets an input or output pass whose element type it does not know."""
    known = {0, *helper.get_all_tensor_dtypes()}
    for kind, values in (("input", proto.graph.input), ("output", proto.graph.output)):
        for value in values:
            if value.type.tensor_type.elem_type not in known:
                where = f"{subject}, {kind} {value.name!r}"
                cause = f"has the unknown element type {value.type.tensor_type.elem_type}"
                raise ModelError(where, cause, "export it again, or upgrade onnx", code="Q103")


def _separate_initializers(proto: ModelProto) -> Cautions:
    """ORT takes an initializer that is a graph input for variable: neither folded nor prepacked nor quantized."""
    graph = proto.graph
    stored = map_stored(graph)
    dropped = [value.name for value in graph.input if value.name in stored]
    before = proto.ir_version
    if stored:
        # ORT reads files of IR version 3 whose initializers are no inputs, which onnx.checker refuses, as version 4.
        proto.ir_version = max(before, PLAIN_INITIALIZERS_IR)
    if not dropped:
        return ()
    drop_named(graph.input, stored)
    if before >= PLAIN_INITIALIZERS_IR and len(dropped) < len(stored):
        # Not the habit of an exporter that lists them all: somebody means to feed these.
        named = join_names(dropped, _SHOWN)
        text = f"inputs with a default value are constants now, and can no longer be fed: {named}"
    else:
        text = f"{len(dropped)} initializers were listed as graph inputs too; they are plain initializers now"
    return (Caution("W113", text),)


def _settle_imports(proto: ModelProto) -> Cautions:
    """Of two versions of a domain ORT takes the last; domains that nobody imports it has in their newest one."""
    versions = {
        "" if entry.domain == "ai.onnx" else entry.domain: entry for entry in proto.opset_import
    }
    for node in walk_all_nodes(proto):
        # onnx.checker finds no operator of ONNX by the domain's longer name.
        if node.domain == "ai.onnx":
            node.domain = ""
    missing = sorted({node.domain for node in walk_nodes(proto.graph)} - {"", *versions})
    # The newest version that onnx knows; 1 of domains that it does not.
    added = (
        helper.make_opsetid(
            domain,
            max((s.since_version for s in defs.get_all_schemas() if s.domain == domain), default=1),
        )
        for domain in missing
    )
    doubled = len(versions) < len(proto.opset_import)
    replace_items(proto.opset_import, [*versions.values(), *added])
    texts = {
        "a domain was imported twice; the last version stays, as ONNX Runtime reads it": doubled,
        f"{', '.join(missing)} was not imported; it is now, as ONNX Runtime reads it": missing,
    }
    return tuple(Caution("W113", text) for text, true in texts.items() if true)


def _sort_graphs(proto: ModelProto) -> Cautions:
    # ORT sorts nodes by itself, takes them in any order, and asks for no graph's name; onnx.checker refuses the file.
    moved = False
    for _, graph in walk_graphs(proto.graph):
        graph.name = graph.name or "graph"
        order = sort_nodes(graph)
        if any(a is not b for a, b in zip(order, graph.node, strict=True)):
            replace_items(graph.node, order)
            moved = True
    return (
        (Caution("W113", "nodes stood before their producers; they are sorted now"),)
        if moved
        else ()
    )


def _raise_opset(proto: ModelProto, subject: str) -> Cautions:
    """Declare the opset that has all operators, where tools put newer ones into a model and left its opset.

    Raises ModelError where another operator of the model is not the same at that opset.
    """
    declared = find_opset(proto)
    light, _ = omit_weights(proto, empty=True)
    set_contrib_apart(light)
    nodes = {node.op_type: node for node in walk_nodes(light.graph) if node.domain in OWN_DOMAINS}
    newer = range(declared + 1, defs.onnx_opset_version() + 1)
    # 0 for an operator that onnx does not know at all: the checker tells of it.
    late = {
        op_type: next((version for version in newer if _find_version(op_type, version)), 0)
        for op_type in nodes
        if not _find_version(op_type, declared)
    }
    if not (declared and late and all(late.values())):
        return ()
    newest = max(late, key=late.__getitem__)
    node = nodes[newest]
    opset = late[newest]
    named = f"{node.name!r} ({newest})" if node.name else label_node(node)
    cause = f"{named} is an operator of opset {opset}, and the model declares opset {declared}"
    other = [
        version
        for version in nodes
        if _find_version(version, declared) not in (0, _find_version(version, opset))
    ]
    if other:
        fix = (
            f"export it at opset {opset}, or convert it with onnx.version_converter before the operator is put in: "
            f"{', '.join(sorted(other)[:_SHOWN])} of opset {declared} may mean something else there"
        )
        raise ModelError(subject, cause, fix, code="Q103")
    declare_opset(proto, opset)
    return (
        Caution(
            "W113",
            f"{cause}; it declares opset {opset} now, at which all its operators are the same",
        ),
    )


def _find_version(op_type: str, opset: int) -> int:
    """The version of one of ONNX's own operators at an opset; 0 where it is not there."""
    try:
        return int(defs.get_schema(op_type, opset, "").since_version)
    except defs.SchemaError:
        return 0


# Bytes of a model file. Below, reading it whole is faster, and it fits into memory several times.
_WORTH_MAPPING = 1 << 26


def _read_lazily(path: Path) -> tuple[ModelProto, WeightStore, ReadBytes]:
    """A model file with stubs for its large weights, their store, and the bytes in use of each data file."""
    store = WeightStore()
    worth = os.path.isfile(path) and _WORTH_MAPPING <= path.stat().st_size <= MESSAGE_LIMIT
    mapped = _read_mapped(path) if worth else None
    proto, inside = mapped or (_parse_model(_read_file(path), path), {})
    opened = {}

    def keep(tensor: TensorProto, extent: Extent) -> bool:
        if not _can_stay(tensor, extent.length):
            return False
        if extent.file not in opened:
            opened[extent.file] = open_data(extent.file)
        return store.put(tensor, _describe_array(tensor, opened[extent.file], extent.offset))

    read_bytes = load_external(proto, path, keep)
    # Now, since stubs are external data to whoever does not know them.
    for number, array in inside.items():
        store.put(proto.graph.initializer[number], array)
    # Before anybody has checked the tensors themselves.
    store.spool_large(path.stat().st_size + sum(read_bytes.values()))
    return proto, store, read_bytes


def _read_mapped(path: Path) -> tuple[ModelProto, dict[int, StoredArray]] | None:
    """The model without its large initializers, and these by their numbers; None for a file that is damaged."""
    check_input_kind(path, ModelError)
    file = open_data(path)
    inside = {}
    with mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) as data:
        try:
            skeleton, left_out = read_skeleton(data, light.SMALLEST_STUB)
        except ValueError:
            return None
        proto = _parse_model(skeleton, path)
        for number, (offset, length) in left_out.items():
            tensor = proto.graph.initializer[number]
            # External data that also has bytes of its own is for the checks to refuse.
            if _can_stay(tensor, length) and not tensor.HasField("data_location"):
                inside[number] = _describe_array(tensor, file, offset)
            else:
                tensor.raw_data = data[offset : offset + length]
    return proto, inside


def _can_stay(tensor: TensorProto, length: int) -> bool:
    """True where the bytes can be looked at as an array without a copy, and are as many as they should be."""
    plain = tensor.data_type in light.SAME_LAYOUT and sys.byteorder == "little"
    return plain and light.SMALLEST_STUB <= length == count_tensor_bytes(tensor)


def _describe_array(tensor: TensorProto, file: OpenFile, offset: int) -> StoredArray:
    return StoredArray(
        file, offset, helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
    )
