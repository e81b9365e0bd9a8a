"""A model file read and written without the bytes of its large initializers, at the level of protobuf's encoding.

protobuf itself reads and writes a message whole: a model of 2 GB would be in memory twice before the first look at it.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, TensorProto

from onnxq.graph.storage import copy_fields, count_tensor_bytes, is_stub

# Field numbers of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.raw_data.
_GRAPH = 7
_INITIALIZER = 5
_RAW = 9
# protobuf's limit on one message.
MESSAGE_LIMIT = 2**31 - 1
# The same, less the room for names and nodes.
ONE_MESSAGE = 2**31 - 2**24
# Kinds of encoding: a varint, 8 bytes, a length and so many bytes, 4 bytes.
_VARINT = 0
_EIGHT = 1
_BYTES = 2
_FOUR = 5
# Bytes, or a file mapped into memory.
Buffer = bytes | mmap.mmap
# Offset and length by a number.
Extents = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class _Field:
    """A field of a message: its number, where it begins (its tag), where its content begins, where it ends."""

    number: int
    kind: int
    begin: int
    content: int
    end: int


def read_skeleton(data: Buffer, least: int) -> tuple[bytes, Extents]:
    """The encoded model without the raw_data of initializers of the main graph that have `least` bytes of it or more.

    Returns it with offset and length of what was left out, by the number of the initializer. Raises ValueError for
    bytes that are no encoded message.
    """
    parts = []
    left_out: Extents = {}
    count = 0
    for field in _walk_fields(data, 0, len(data)):
        if field.number != _GRAPH or field.kind != _BYTES:
            parts.append(data[field.begin : field.end])
            continue
        graph = []
        for inner in _walk_fields(data, field.content, field.end):
            if inner.number != _INITIALIZER or inner.kind != _BYTES:
                graph.append(data[inner.begin : inner.end])
                continue
            graph.append(_strip_tensor(data, inner, least, count, left_out))
            count += 1
        parts.append(_wrap(_GRAPH, b"".join(graph)))
    return b"".join(parts), left_out


def _strip_tensor(
    data: Buffer, tensor: _Field, least: int, number: int, left_out: Extents
) -> bytes:
    """The encoded field of an initializer, without its raw_data where that is long."""
    if tensor.end - tensor.content < least:
        return data[tensor.begin : tensor.end]
    parts = []
    for field in _walk_fields(data, tensor.content, tensor.end):
        if field.number == _RAW and field.kind == _BYTES and field.end - field.content >= least:
            # A field that stands twice holds what it was given last.
            left_out[number] = field.content, field.end - field.content
        else:
            parts.append(data[field.begin : field.end])
    return _wrap(_INITIALIZER, b"".join(parts))


def _walk_fields(data: Buffer, begin: int, end: int) -> Iterator[_Field]:
    at = begin
    while at < end:
        # protobuf: a field's number and kind share a varint, kind in the lowest three bits.
        tag, content = _read_varint(data, at, end)
        number = tag >> 3
        kind = tag & 7
        if kind == _VARINT:
            _, stop = _read_varint(data, content, end)
        elif kind == _BYTES:
            length, content = _read_varint(data, content, end)
            stop = content + length
        elif kind in (_EIGHT, _FOUR):
            stop = content + (8 if kind == _EIGHT else 4)
        else:
            raise ValueError(f"no field of kind {kind}")
        # Fields are numbered from 1.
        if not number or stop > end:
            raise ValueError("a field leaves its message")
        yield _Field(number, kind, at, content, stop)
        at = stop


def _read_varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """A number in groups of seven bits, low ones first, and where it ends."""
    value = shift = 0
    # Ten groups of seven bits hold the largest number, of 64.
    for byte in data[at : min(at + 10, end)]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number does not end")


def _wrap(number: int, content: bytes) -> bytes:
    """A field of bytes, encoded."""
    return _begin(number, len(content)) + content


def _begin(number: int, length: int) -> bytes:
    """The tag and the length of an encoded field of bytes."""
    # Fields below 16, as all of these, have a tag of one byte.
    head = bytearray([number << 3 | _BYTES])
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head)


def write_model(
    proto: ModelProto, read: Callable[[TensorProto], Iterator[bytes]]
) -> Iterator[bytes]:
    """The encoded model, piece by piece, with the bytes of stubs in their place: as protobuf writes it whole.

    read: the bytes of a stub, piece by piece. Raises ValueError for a model over 2 GB, which nobody could read.
    """
    around = ModelProto()
    bare = GraphProto()
    copy_fields(proto, around, ("graph",))
    copy_fields(proto.graph, bare, ("initializer",))
    before, after = _split(bare.SerializeToString(deterministic=True), _INITIALIZER)
    tensors = [_encode_tensor(tensor) for tensor in proto.graph.initializer]
    inner = sum(len(head) + length + len(tail) for head, length, tail in tensors)
    first, last = _split(around.SerializeToString(deterministic=True), _GRAPH)
    if len(first) + len(before) + inner + len(after) + len(last) > MESSAGE_LIMIT:
        raise ValueError("over 2 GB in one file")
    yield first + _begin(_GRAPH, len(before) + inner + len(after)) + before
    for tensor, (head, length, tail) in zip(proto.graph.initializer, tensors, strict=True):
        yield head
        if length:
            yield from read(tensor)
        yield tail
    yield after + last


def _encode_tensor(tensor: TensorProto) -> tuple[bytes, int, bytes]:
    """The encoded initializer in front of a stub's bytes, their number, and behind them; whole, 0, b"" for no stub."""
    if not is_stub(tensor):
        return _wrap(_INITIALIZER, tensor.SerializeToString(deterministic=True)), 0, b""
    bare = TensorProto()
    copy_fields(tensor, bare, ("external_data", "data_location"))
    before, after = _split(bare.SerializeToString(deterministic=True), _RAW)
    length = count_tensor_bytes(tensor)
    raw = _begin(_RAW, length)
    whole = len(before) + len(raw) + length + len(after)
    return _begin(_INITIALIZER, whole) + before + raw, length, after


def _split(message: bytes, number: int) -> tuple[bytes, bytes]:
    """An encoded message in front of and behind the place of a field that it lacks: fields stand in order."""
    at = next(
        (field.begin for field in _walk_fields(message, 0, len(message)) if field.number > number),
        len(message),
    )
    return message[:at], message[at:]
