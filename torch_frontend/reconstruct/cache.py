"""Inputs and targets of one unit over all samples: in memory up to a limit, then in a temporary file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onnxq.errors import DataError
from onnxq.files import ScratchFolder

Values = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Record:
    """What one batch gave: inputs behind quantized units, the same in float (if asked for), and the float output."""

    inputs: Values
    floats: Values
    target: Tensor


class Cache:
    """Records of one unit; a context, since a file may back it.

    A tensor whose first dimension is the target's is cut into samples, everything else belongs to its batch. When
    all batches agree but for the samples, draws mix samples of all batches; else every draw is from one batch.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.device = limit, torch.device("cpu")
        self.held = self.spilled = 0
        self.records: list[Record] = []
        self._folder: ScratchFolder | None = None

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.records.clear()
        if self._folder is not None:
            self._folder.remove()

    def add(self, record: Record) -> None:
        """Keep one batch. Raises DataError if its target has no samples."""
        if record.target.dim() == 0 or not len(record.target):
            raise DataError("reconstruction", "a batch without samples", "leave empty batches out", code="Q203")
        self.device = record.target.device
        inputs, floats = (tuple(self._kept(v) for v in values) for values in (record.inputs, record.floats))
        self.records.append(Record(inputs, floats, self._kept(record.target)))

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(len(record.target) for record in self.records)

    def batches(self) -> Iterator[Record]:
        """All records in order, on the model's device."""
        for record in self.records:
            yield self._there(record)

    def mixes(self) -> bool:
        """True if samples of different batches may stand in one draw."""
        first = self.records[0]
        return all(_alike(first, record) for record in self.records)

    def draw(self, size: int, generator: torch.Generator, mixed: bool) -> Record:
        """`size` random samples (all there are, if fewer), from all batches or from one."""
        if mixed:
            rows = torch.randperm(self.count, generator=generator)[:size].tolist()
            return self._rows([self._at(row) for row in rows])
        record = self.records[int(torch.randint(len(self.records), (1,), generator=generator))]
        if any(not isinstance(v, Tensor) for v in record.inputs):  # sizes and the like hold for the whole batch
            return self._there(record)
        rows = torch.randperm(len(record.target), generator=generator)[:size].tolist()
        return self._rows([(record, row) for row in rows])

    def _at(self, row: int) -> tuple[Record, int]:
        for record in self.records:
            if row < len(record.target):
                return record, row
            row -= len(record.target)
        raise IndexError(row)

    def _rows(self, picked: list[tuple[Record, int]]) -> Record:
        first = picked[0][0]

        def stacked(part: str) -> Values:
            return tuple(
                torch.stack([getattr(record, part)[k][row].to(self.device) for record, row in picked])
                if _sampled(value, first)
                else self._moved(value)
                for k, value in enumerate(getattr(first, part))
            )

        target = torch.stack([record.target[row].to(self.device) for record, row in picked])
        return Record(stacked("inputs"), stacked("floats"), target)

    def _there(self, record: Record) -> Record:
        inputs, floats = (tuple(map(self._moved, values)) for values in (record.inputs, record.floats))
        return Record(inputs, floats, self._moved(record.target))

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        size = value.numel() * value.element_size()
        if self.held + size <= self.limit:
            self.held += size
            return value.detach().clone()
        self.spilled += size
        if not value.numel():
            return value.detach().clone()
        if self._folder is None:
            self._folder = ScratchFolder()
        path = self._folder.path / f"{len(list(self._folder.path.iterdir()))}.bin"
        backed = torch.from_file(str(path), shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
        return backed.copy_(value.detach())


def _sampled(value: Any, record: Record) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(record.target)


def _alike(one: Record, other: Record) -> bool:
    if one.target.shape[1:] != other.target.shape[1:] or len(one.inputs) != len(other.inputs):
        return False
    for a, b in zip((*one.inputs, *one.floats), (*other.inputs, *other.floats), strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor) or _sampled(a, one) != _sampled(b, other):
            return False
        if not isinstance(a, Tensor):
            return False
        if _sampled(a, one):
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                return False
        elif a.shape != b.shape or not torch.equal(a, b):
            return False
    return True
