"""Finished pieces in a folder, one file each, from which interrupted work goes on."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.errors import OutputError
from onnxq.files import replace_files
from onnxq.workers.packing import pack_value, unpack_value

_ENDING = ".piece"
# Bytes; above it packing takes longer than writing.
_WORTH_PACKING = 2**24
# What reading a file raises that is damaged, or of another version.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, zlib.error)


class Journal:
    """The pieces in a folder, by their keys. A file appears whole or not at all, at whatever moment a run is killed.

    Raises OutputError for a folder that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(folder, error.strerror or str(error), "name another folder", code="Q604") from error
        self._earlier = {path.stem for path in folder.glob(f"*{_ENDING}")}
        self._used: set[str] = set()

    @property
    def earlier(self) -> int:
        """Number of pieces of earlier runs."""
        return len(self._earlier)

    @property
    def used(self) -> int:
        """Number of those that this run took."""
        return len(self._used)

    def holds(self, key: str) -> bool:
        """True where the piece is finished."""
        return bool(key) and self._path(key).exists()

    def read(self, key: str) -> Any:
        """Return the result of a piece; None where it is not finished, or its file is damaged."""
        try:
            with self._path(key).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                text = bytes(file["value"]).decode("utf-8")
                found = unpack_value(text, [file[f"a{k}"] for k in range(len(file.files) - 1)])
        except _DAMAGED:
            return None
        self._used |= {key} & self._earlier
        return found

    def write(self, key: str, value: Any) -> None:
        """Write the result of a piece. Raises OutputError where that fails, ConfigError for one that is not plain."""
        text, arrays = pack_value(value)
        parts = {"value": np.frombuffer(text.encode("utf-8"), np.uint8)}
        parts |= {f"a{k}": array for k, array in enumerate(arrays)}
        with replace_files([self._path(key)], overwrite=True) as files:
            # Histograms are mostly zeros; weights are not, and large.
            save: Any = np.savez_compressed if sum(map(len, arrays)) < _WORTH_PACKING else np.savez
            save(files[0], **parts)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"
