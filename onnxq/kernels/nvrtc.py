"""NVIDIA's run-time compiler by ctypes. Every CUDA build of torch has it, and it needs neither GPU nor driver."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onnxq.errors import MissingDependencyError

# torch's CUDA wheels and the extra `nvrtc` bring nvidia/cuda_nvrtc (CUDA 12) or nvidia/cu13 into site-packages.
_WINDOWS = sys.platform == "win32"
_LIBRARY, _BUILTINS = (
    ("nvrtc64_*.dll", "nvrtc-builtins64_*.dll") if _WINDOWS else ("libnvrtc.so.*", "libnvrtc-builtins.so.*")
)
_FOLDERS = ("bin", "bin/x86_64") if _WINDOWS else ("lib", "lib64")
# -default-device: functions without an annotation are device code.
_OPTIONS = ("--std=c++17", "-default-device")


@dataclass(frozen=True)
class Nvrtc:
    """A loaded NVRTC."""

    path: Path
    # E.g. "13.0".
    version: str
    # Compute capabilities it compiles for, as 75, 90, 120.
    archs: tuple[int, ...]

    def compile(self, name: str, source: str, headers: Mapping[str, str], arch: int) -> tuple[bytes, str]:
        """Compile for `arch`: a cubin, or PTX for the driver to complete if this NVRTC is older than the GPU.

        Returns the code and its kind, "cubin" or "ptx". Raises MissingDependencyError with the compiler's log.
        """
        known = max((one for one in self.archs if one <= arch), default=None)
        if known is None:
            raise MissingDependencyError(
                f"sm_{arch}",
                f"NVRTC {self.version} compiles for {', '.join(map(str, self.archs))}",
                "install another",
                code="Q808",
            )
        # Code for a lower minor number runs on a higher one; a new major number needs PTX.
        kind = "cubin" if known // 10 == arch // 10 else "ptx"
        target = f"sm_{known}" if kind == "cubin" else f"compute_{known}"
        return self._compile(name, source, headers, (f"--gpu-architecture={target}", *_OPTIONS), kind), kind

    def _compile(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str], kind: str
    ) -> bytes:  # fmt: skip
        library, program = _load_library(self.path), ctypes.c_void_p()
        _check_code(library, library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), len(headers), _to_c_strings(headers.values()),
            _to_c_strings(headers),
        ))  # fmt: skip
        try:
            code = library.nvrtcCompileProgram(program, len(options), _to_c_strings(options))
            if code:
                log = _read_output(library, "nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise MissingDependencyError(
                    "CUDA kernels", f"NVRTC {self.version} failed: {log}", "install another", code="Q807"
                )
            return _read_output(library, "nvrtcGetCUBIN" if kind == "cubin" else "nvrtcGetPTX", program)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def find_nvrtc(extra: Sequence[Path] = ()) -> Nvrtc | None:
    """Find the first NVRTC that loads: $ONNXQ_NVRTC, `extra` (files or folders), site-packages, the CUDA toolkit."""
    for path in _list_candidates(extra):
        try:
            return _describe_library(path)
        except (OSError, AttributeError, MissingDependencyError):
            continue
    return None


def _list_candidates(extra: Sequence[Path]) -> Iterator[Path]:
    named = os.environ.get("ONNXQ_NVRTC")
    for place in (*((Path(named),) if named else ()), *extra):
        yield from _in_folder(place) if place.is_dir() else (place,)
    for entry in map(Path, sys.path):
        for folder in _FOLDERS:
            for found in sorted(entry.glob(f"nvidia/*/{folder}"), reverse=True):
                yield from _in_folder(found)
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        for folder in _FOLDERS if toolkit else ():
            yield from _in_folder(Path(str(toolkit)) / folder)


def _in_folder(place: Path) -> list[Path]:
    # The newest version first; ".alt." libraries are variants of the usual one.
    return sorted((path for path in place.glob(_LIBRARY) if ".alt." not in path.name), reverse=True)


@cache
def _load_library(path: Path) -> Any:
    # NVRTC opens its builtins by name only, and the loader does not search a wheel's folder: open them before.
    for builtins in sorted(path.parent.glob(_BUILTINS)):
        if ".alt." not in builtins.name:
            ctypes.CDLL(str(builtins), mode=getattr(ctypes, "RTLD_GLOBAL", 0))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


@cache
def _describe_library(path: Path) -> Nvrtc:
    library, major, minor, count = _load_library(path), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check_code(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    _check_code(library, library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    archs = (ctypes.c_int * count.value)()
    _check_code(library, library.nvrtcGetSupportedArchs(archs))
    return Nvrtc(path, f"{major.value}.{minor.value}", tuple(sorted(archs)))


def _read_output(library: Any, function: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check_code(library, getattr(library, f"{function}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_code(library, getattr(library, function)(program, text))
    return text.raw


def _to_c_strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _check_code(library: Any, code: int) -> None:
    if code:
        raise MissingDependencyError(
            "NVRTC", library.nvrtcGetErrorString(code).decode(), "install another", code="Q807"
        )
