"""Device code for a GPU: from a wheel, from the cache, or compiled on request; ahead of time by nvcc or NVRTC.

NVRTC, NVIDIA's run-time compiler, is called by ctypes. Every CUDA build of torch has it, and it needs neither GPU nor
driver.
"""

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from onnxq.errors import ConfigError, MissingDependencyError
from onnxq.kernels import cache as store
from onnxq.kernels import sources
from onnxq.kernels.sources import run_compiler

# torch's CUDA wheels and the extra `nvrtc` bring nvidia/cuda_nvrtc (CUDA 12) or nvidia/cu13 into site-packages.
_WINDOWS = sys.platform == "win32"
_LIBRARY, _BUILTINS = (
    ("nvrtc64_*.dll", "nvrtc-builtins64_*.dll")
    if _WINDOWS
    else ("libnvrtc.so.*", "libnvrtc-builtins.so.*")
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

    def compile_source(
        self, name: str, source: str, headers: Mapping[str, str], arch: int
    ) -> bytes:
        """Compile for `arch`: a cubin, or PTX for the driver to complete if this NVRTC is older than the GPU.

        Raises MissingDependencyError with the compiler's log.
        """
        known = max((supported for supported in self.archs if supported <= arch), default=None)
        if known is None:
            cause = f"NVRTC {self.version} compiles for {', '.join(map(str, self.archs))}"
            raise MissingDependencyError(f"sm_{arch}", cause, "install another", code="Q808")
        # Code for a lower minor number runs on a higher one; a new major number needs PTX.
        same = known // 10 == arch // 10
        target, kind = (f"sm_{known}", "CUBIN") if same else (f"compute_{known}", "PTX")
        options = (f"--gpu-architecture={target}", *_OPTIONS)
        return self._run_program(name, source, headers, options, kind)

    def _run_program(
        self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str], kind: str
    ) -> bytes:
        library = _load_library(self.path)
        program = ctypes.c_void_p()
        _check_code(
            library,
            library.nvrtcCreateProgram(
                ctypes.byref(program),
                source.encode(),
                name.encode(),
                len(headers),
                _to_c_strings(headers.values()),
                _to_c_strings(headers),
            ),
        )
        try:
            code = library.nvrtcCompileProgram(program, len(options), _to_c_strings(options))
            if code:
                log = _read_output(library, "nvrtcGetProgramLog", program).rstrip(b"\0")
                cause = f"NVRTC {self.version} failed: {log.decode(errors='replace')}"
                raise MissingDependencyError("CUDA kernels", cause, "install another", code="Q807")
            return _read_output(library, f"nvrtcGet{kind}", program)
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
        yield from _list_libraries([place]) if place.is_dir() else (place,)
    for entry in map(Path, sys.path):
        for folder in _FOLDERS:
            yield from _list_libraries(entry.glob(f"nvidia/*/{folder}"))
    for toolkit in _list_toolkits():
        for folder in _FOLDERS:
            yield from _list_libraries([toolkit / folder])


def _list_toolkits() -> list[Path]:
    """The folders that a CUDA toolkit may be in."""
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [Path(place) for place in named if place]


def _list_libraries(folders: Iterable[Path]) -> list[Path]:
    # The newest version first, as their names say; ".alt." libraries are variants of the usual one.
    paths = (path for place in folders for path in place.glob(_LIBRARY) if ".alt." not in path.name)
    return sorted(paths, key=attrgetter("name"), reverse=True)


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
    library = _load_library(path)
    major = ctypes.c_int()
    minor = ctypes.c_int()
    count = ctypes.c_int()
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


# Default architectures of a fatbin, as far as the compiler supports them: Turing to Blackwell.
ARCHS = (75, 80, 86, 89, 90, 100, 120)
_FIX = 'install nvidia-cuda-nvrtc (pip install "onnxq[nvrtc]"), or run onnxq build-kernels where nvcc is'


@dataclass(frozen=True)
class DeviceImage:
    """A cubin, PTX or fatbin."""

    # The argument of cuModuleLoadData.
    data: bytes
    # Text for messages.
    origin: str


def device_image(arch: str, nvrtc: Sequence[Path] = ()) -> DeviceImage:
    """Return code for `arch` ("sm_90"): built ahead of time, or else compiled by NVRTC and cached.

    nvrtc: where to look for NVRTC first. Raises MissingDependencyError if there is neither.
    """
    number = arch_number(arch)
    ready = _find_prebuilt(number)
    if ready is not None:
        return DeviceImage(ready.path.read_bytes(), f"ahead of time, {ready.path}")
    compiler = find_nvrtc(nvrtc)
    if compiler is not None:
        entry = build_cubin(compiler, number, store.choose_folder())
        return DeviceImage(entry.path.read_bytes(), f"NVRTC {compiler.version}, {entry.path}")
    # Compiled by an NVRTC that is gone since.
    wanted = _identify_source() | {"archs": str(number)}
    left = store.find_entry(store.choose_folder(), lambda key: key.items() >= wanted.items())
    if left is None:
        raise MissingDependencyError(
            f"CUDA kernels for sm_{number}",
            "nothing is built and NVRTC is not found",
            _FIX,
            code="Q808",
        )
    return DeviceImage(left.path.read_bytes(), f"cache, {left.path}")


def arch_number(arch: str) -> int:
    """Parse "sm_90", "90", "9.0" or "compute_90" as 90. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?", arch.strip())
    if match is None:
        raise ConfigError(
            f"architecture {arch!r}", "is not one", "write it as sm_90 or 9.0", code="Q304"
        )
    return int(match[1] + match[2])


def build_cubin(
    compiler: Nvrtc, arch: int, place: Path | None = None, *, force: bool = False
) -> store.CacheEntry:
    """Compile for one GPU by NVRTC, into the cache or another folder. Raises OnnxqError on failure."""
    key = _identify_source() | {"compiler": f"NVRTC {compiler.version}", "archs": str(arch)}

    def build(path: Path) -> None:
        texts = sources.read_sources(sources.DEVICE)
        headers = {name: texts[name] for name in sources.HEADERS}
        name = sources.DEVICE[0]
        path.write_bytes(compiler.compile_source(name, texts[name], headers, arch))

    return store.fetch_entry(place, f"fq-sm_{arch}-{{}}.cubin", key, build, force=force)


def build_fatbin(
    archs: Sequence[int], place: Path | None = None, *, force: bool = False
) -> store.CacheEntry:
    """Compile for many GPUs by nvcc, into the cache or another folder.

    archs: as 75, 90; none: those of ARCHS that this nvcc supports. Raises OnnxqError without nvcc or if it fails.
    """
    compiler, version, known = find_nvcc()
    chosen = tuple(archs) or tuple(number for number in ARCHS if number in known)
    unknown = [str(number) for number in chosen if number not in known]
    if unknown:
        raise ConfigError(
            f"architecture {', '.join(unknown)}",
            f"{version} knows {', '.join(map(str, known))}",
            "use another nvcc",
            code="Q304",
        )
    ordered = sorted(chosen)
    key = _identify_source() | {"compiler": version, "archs": ",".join(map(str, ordered))}

    def build(path: Path) -> None:
        # nvcc compiles for all of them at once, in as many threads as there are
        # cores (--threads=0).
        codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ordered]
        source = str(sources.find_folder() / sources.DEVICE[0])
        _run(
            [
                compiler,
                "-fatbin",
                "-std=c++17",
                "--threads=0",
                *codes,
                "-x",
                "cu",
                source,
                "-o",
                str(path),
            ]
        )

    return store.fetch_entry(place, "fq-{}.fatbin", key, build, force=force)


@cache
def find_nvcc() -> tuple[str, str, tuple[int, ...]]:
    """Find nvcc: its path, its version, its architectures. Raises MissingDependencyError without one."""
    named = os.environ.get("ONNXQ_NVCC")
    beside = [shutil.which("nvcc", path=toolkit / "bin") for toolkit in _list_toolkits()]
    path = (
        shutil.which(named) if named else next(filter(None, (shutil.which("nvcc"), *beside)), None)
    )
    if path is None:
        raise MissingDependencyError(
            "CUDA kernels",
            f"there is no {named or 'nvcc'}",
            "install the CUDA toolkit",
            code="Q806",
        )
    release = re.search(r"release (\S+),", _run([path, "--version"]))
    known = re.findall(r"^sm_(\d+)$", _run([path, "--list-gpu-code"]), re.MULTILINE)
    version = f"nvcc {release[1] if release else 'unknown'}"
    return path, version, tuple(sorted(map(int, known)))


def _identify_source() -> dict[str, str]:
    return sources.identify_sources("device", sources.DEVICE)


def _find_prebuilt(arch: int) -> store.CacheEntry | None:
    """Find code of a wheel, or built by nvcc here. NVRTC's code is found by its version, which may suit the driver."""

    def wanted(key: store.Key) -> bool:
        # Code for a lower minor number of the same major number runs, too.
        archs = [int(number) for number in key.get("archs", "").split(",") if number.isdigit()]
        runs = any(number // 10 == arch // 10 and number <= arch for number in archs)
        return runs and key.items() >= _identify_source().items()

    shipped = store.find_entry(sources.find_folder() / sources.PREBUILT, wanted)
    if shipped is not None:
        return shipped
    return store.find_entry(
        store.choose_folder(),
        lambda key: wanted(key) and key.get("compiler", "").startswith("nvcc"),
    )


def _run(command: list[str]) -> str:
    return run_compiler(command, "CUDA kernels", "set ONNXQ_NVCC", "set ONNXQ_NVCC to another nvcc")
