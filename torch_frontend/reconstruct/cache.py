"""Inputs and targets of one unit over all samples: in memory up to a limit, then in a temporary file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onnxq.errors import DataError
from onnxq.files import ScratchFolder

Values = tuple[Any, ...]


class Record(NamedTuple):
    """Values of one batch: a unit's inputs behind quantized units, the same in float (for QDrop), its float output."""

    inputs: Values
    floats: Values
    target: Tensor


class UnitCache:
    """Records of one unit; a context manager, which removes the files behind it.

    limit: bytes in memory. A tensor with the target's first dimension is cut into samples, everything else belongs to
    its batch. If all batches agree but for the samples, draws mix samples of all batches; else each is from one batch.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.device = torch.device("cpu")
        self.stored = self.spilled = 0  # bytes in memory, and in files
        self.records: list[Record] = []
        self._folder: ScratchFolder | None = None

    def __enter__(self) -> UnitCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.records.clear()
        if self._folder is not None:
            self._folder.remove()

    def add_record(self, record: Record) -> None:
        """Store one batch. Raises DataError if its target has no samples."""
        if record.target.dim() == 0 or not len(record.target):
            raise DataError(
                "reconstruction", "a batch without samples", "leave empty batches out", code="Q203"
            )
        self.device = record.target.device
        self.records.append(tree_map_only(Tensor, self._store_tensor, record))

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(len(record.target) for record in self.records)

    def iterate_records(self) -> Iterator[Record]:
        """All records in order, on the model's device."""
        for record in self.records:
            yield self._move_to_device(record)

    def can_mix(self) -> bool:
        """True if one draw may hold samples of different batches."""
        first = self.records[0]
        return all(_mixes_with(first, record) for record in self.records)

    def draw_samples(self, size: int, generator: torch.Generator, mixed: bool) -> Record:
        """`size` random samples (all if there are fewer), from all batches (mixed) or from one."""
        records = self.records
        if not mixed:
            record = records[int(torch.randint(len(records), (1,), generator=generator))]
            # Sizes and the like fit the whole batch only.
            if not all(isinstance(value, Tensor) for value in record.inputs):
                return self._move_to_device(record)
            records = [record]
        places = [(record, row) for record in records for row in range(len(record.target))]
        rows = torch.randperm(len(places), generator=generator)[:size].tolist()
        return self._stack_rows([places[row] for row in rows])

    def _stack_rows(self, picked: list[tuple[Record, int]]) -> Record:
        """A Record of these rows, on the model's device; values that are no samples are those of the first."""
        first = picked[0][0]

        def stacked(part: str) -> Values:
            return tuple(
                torch.stack(
                    [getattr(record, part)[k][row].to(self.device) for record, row in picked]
                )
                if _has_samples(value, first)
                else self._move_to_device(value)
                for k, value in enumerate(getattr(first, part))
            )

        target = torch.stack([record.target[row].to(self.device) for record, row in picked])
        return Record(stacked("inputs"), stacked("floats"), target)

    def _move_to_device(self, values: Any) -> Any:
        # What was spilled lies on the host.
        return tree_map_only(Tensor, lambda value: value.to(self.device), values)

    def _store_tensor(self, value: Tensor) -> Tensor:
        """A copy of the value: in memory below the limit, else a tensor backed by a file."""
        size = value.numel() * value.element_size()
        if self.stored + size <= self.limit:
            self.stored += size
            return value.detach().clone()
        self.spilled += size
        if self._folder is None:
            self._folder = ScratchFolder()
        path = self._folder.path / f"{len(list(self._folder.path.iterdir()))}.bin"
        backed = torch.from_file(
            str(path), shared=True, size=value.numel(), dtype=value.dtype
        ).view(value.shape)
        return backed.copy_(value.detach())


def _has_samples(value: Any, record: Record) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(record.target)


def _mixes_with(record: Record, other: Record) -> bool:
    """True if the records agree in everything but their samples' values."""
    if record.target.shape[1:] != other.target.shape[1:] or len(record.inputs) != len(other.inputs):
        return False
    for a, b in zip(record.inputs + record.floats, other.inputs + other.floats, strict=True):
        sampled = _has_samples(a, record)
        # Sizes and the like may depend on the number of samples.
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or sampled != _has_samples(
            b, other
        ):
            return False
        if sampled:
            if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
                return False
        elif a.shape != b.shape or not torch.equal(a, b):
            return False
    return True
