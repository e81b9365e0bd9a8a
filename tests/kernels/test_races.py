"""The kernels under sanitizers: no two threads meet at an address, none leaves its arrays; and faults are seen."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnxq.kernels import sources
from tests.kernels.conftest import GXX, Emulation

ROOT = Path(__file__).parents[2]
CHILD = """
import ctypes, sys
from onnxq.kernels import DType
from tests.kernels.machines import case, on_grid
grid = on_grid(ctypes.CDLL(sys.argv[1]))
shapes = [((3001,), None, 0), ((40, 33, 8), 1, 0), ((40, 3, 5), 1, 0), ((3, 2, 600), 1, 0), ((5, 70), 1, 32)]
for shape, axis, block in shapes:
    grid(case(shape, axis, block, DType.F32, -8, 7, 1), True, True)
"""
TWIN = """
import ctypes, sys
from onnxq.kernels import DType
from tests.kernels.machines import case, on_cpu
run = on_cpu(ctypes.CDLL(sys.argv[1]))
shapes = [((3001,), None, 0), ((40, 33, 8), 1, 0), ((2001, 3), 1, 0), ((3, 2, 600), 1, 0), ((5, 70), 1, 32),
          ((9, 1100), 1, 0), ((50, 7), 0, 16), ((7,), None, 0), ((4, 33), 0, 0)]
for shape, axis, block in shapes:
    for dtype in DType:
        for dx, sums in ((True, True), (True, False), (False, True)):
            run(case(shape, axis, block, dtype, -8, 7, 1), dx, sums)
"""
KINDS = ("f32",)
BARRIER = "__syncthreads();"
BARRIERS = (sources.find_folder() / "fq_kernels.cuh").read_text("utf-8").count(BARRIER)


class Sanitizer:
    """Runs the emulated kernels in a Python with a sanitizer's library loaded first."""

    def __init__(self, name: str, library: str, options: dict[str, str]) -> None:
        if GXX is None:
            pytest.skip("no g++")
        found = subprocess.run([str(GXX), f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()
        if not os.path.isabs(found):
            pytest.skip(f"g++ has no {library}")
        self.environment = {**os.environ, "LD_PRELOAD": found, "PYTHONPATH": str(ROOT), **options}
        # Where addresses are too random for the sanitizer, processes start without that.
        plain: tuple[str, ...] = ()
        setarch = shutil.which("setarch")
        self.prefix = next((p for p in (plain, (setarch, "-R") if setarch else plain) if self._starts(p)), None)
        if self.prefix is None:
            pytest.skip(f"{name} does not run here")

    def _starts(self, prefix: tuple[str, ...]) -> bool:
        return (
            subprocess.run([*prefix, sys.executable, "-c", ""], env=self.environment, capture_output=True).returncode
            == 0
        )

    def run(self, library: Path, child: str = CHILD) -> subprocess.CompletedProcess[str]:
        command = [*self.prefix, sys.executable, "-c", child, str(library)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def threads() -> Sanitizer:
    return Sanitizer("ThreadSanitizer", "libtsan.so", {"TSAN_OPTIONS": "exitcode=66 halt_on_error=1"})


@pytest.fixture(scope="module")
def addresses() -> Sanitizer:
    # Python itself frees not everything at its end.
    return Sanitizer("AddressSanitizer", "libasan.so", {"ASAN_OPTIONS": "exitcode=67:detect_leaks=0"})


# Compiling takes most of these tests' time, and a quarter of it without optimization.
PLAIN = ("-O0", "-g1")
THREADS = ("-fsanitize=thread", "-DEMU_THREADS", *PLAIN)
UNDEFINED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *PLAIN)
# Threads here too: fibers jump between stacks, which AddressSanitizer takes for a fault.
ADDRESSES = (*UNDEFINED, "-DEMU_THREADS")


def test_threads_meet_only_at_barriers(threads: Sanitizer, emulation: Emulation) -> None:
    done = threads.run(emulation(*THREADS, kinds=KINDS))
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize("number", range(BARRIERS))
def test_a_missing_barrier_is_seen(threads: Sanitizer, emulation: Emulation, number: int) -> None:
    def without(text: str) -> str:
        before, after = text.split(BARRIER)[: number + 1], text.split(BARRIER)[number + 1 :]
        return BARRIER.join(before) + BARRIER.join(after)

    library = emulation(*THREADS, edit=without, kinds=KINDS)
    # The sanitizer sees what happened, not what could have: on a busy machine threads may miss each other once.
    for _ in range(8):
        done = threads.run(library)
        if done.returncode:
            break
    assert done.returncode == 66
    assert "data race" in done.stderr


def test_no_access_leaves_its_array(addresses: Sanitizer, emulation: Emulation) -> None:
    done = addresses.run(emulation(*ADDRESSES, kinds=KINDS))
    assert done.returncode == 0, done.stderr[:3000]


# Compiling is all of the time, and checks of arithmetic double it: they are in the half types' conversions by hand,
# which are compiled where the processor has none.
@pytest.mark.parametrize(
    "flags",
    [("-fsanitize=address", *PLAIN, "-march=native"), pytest.param(UNDEFINED, marks=pytest.mark.slow)],
    ids=["this processor", "any"],
)
def test_the_cpu_twin_stays_in_its_arrays(addresses: Sanitizer, tmp_path: Path, flags: tuple[str, ...]) -> None:
    library = tmp_path / "twin.so"
    options = ("-std=c++17", "-shared", "-fPIC", *flags)
    source = sources.find_folder() / sources.HOST[0]
    subprocess.run([str(GXX), *options, "-o", str(library), str(source)], check=True)
    done = addresses.run(library, TWIN)
    assert done.returncode == 0, done.stderr[:3000]


def test_a_vector_beyond_the_end_is_seen(addresses: Sanitizer, emulation: Emulation) -> None:
    guard = "begin + share > call.count"
    done = addresses.run(
        emulation(*ADDRESSES, edit=lambda text: text.replace(guard, "begin > call.count"), kinds=KINDS)
    )
    assert done.returncode == 67
    assert "heap-buffer-overflow" in done.stderr


def test_a_barrier_not_all_threads_reach_is_an_error(emulation: Emulation) -> None:
    early = "if (lane != 0 || index >= call.segments) return;"
    tree = "sum = fq_tree(sum, lane, lanes, 1);"

    def parted(text: str) -> str:
        text = text.replace(early, "if (lane != 0) return;")
        return text.replace(tree, f"if (index >= call.segments) return;\n{tree}")

    for options in (PLAIN, ("-DEMU_THREADS", "-pthread", *PLAIN)):
        command = [sys.executable, "-c", CHILD, str(emulation(*options, edit=parted, kinds=KINDS))]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert "a barrier was not reached by all threads" in done.stderr
