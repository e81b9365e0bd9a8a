"""What a machine offers: threads for small tasks and for matrix products, and the kind of its CPU."""

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController

from onnxq.numerics import machine
from onnxq.numerics import machine as host
from onnxq.runtime import CPU_KINDS, detect_cpu
from onnxq.workers import count_threads, use_threads


@given(items=st.lists(st.integers()), threads=st.integers(0, 4))
def test_results_come_in_the_order_of_the_items(items: list[int], threads: int) -> None:
    def work(item: int) -> int:
        time.sleep(item % 3 / 10_000)
        return item + 1

    assert list(host.map_in_threads(work, items, threads=threads)) == [item + 1 for item in items]


def test_as_many_run_at_a_time_as_there_are_threads() -> None:
    # Both wait for each other: one thread alone would never end.
    barrier = threading.Barrier(2, timeout=60)
    assert sorted(host.map_in_threads(lambda _: barrier.wait(), range(2), threads=2)) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_fault_is_raised_in_the_place_of_its_result(threads: int) -> None:
    def work(item: int) -> int:
        if item == 2:
            raise ValueError(f"item {item}")
        return item

    results = host.map_in_threads(work, range(10), threads=threads)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="item 2"):
        next(results)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_items_are_read_no_further_ahead_than_there_are_threads(threads: int) -> None:
    read, here = [], threading.get_ident()

    def items() -> Iterator[int]:
        for item in range(100):
            assert threading.get_ident() == here
            read.append(item)
            yield item

    results = host.map_in_threads(lambda item: item, items(), threads=threads)
    for done in range(1, 20):
        next(results)
        assert len(read) <= done + threads
    # Whoever has enough stops the work.
    results.close()  # type: ignore[attr-defined]
    assert len(read) <= 19 + threads


@pytest.mark.parametrize(
    ("cores", "runs", "share"), [(2, 1, 2), (2, 2, 1), (2, 8, 1), (16, 5, 3), (16, 16, 1), (1, 4, 1), (4, 0, 4)]
)
def test_runs_side_by_side_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, runs: int, share: int) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: cores)
    assert host.share_cores(runs) == share


def test_threads_are_started_once() -> None:
    def name_thread(_: int) -> str:
        time.sleep(0.001)
        return threading.current_thread().name

    first = set(host.map_in_threads(name_thread, range(20), threads=2))
    assert set(host.map_in_threads(name_thread, range(20), threads=2)) == first
    assert len(first) == 2


def test_work_may_share_work_itself() -> None:
    # A thread that waited for others of its own pool would wait for ever.
    def add_up(item: int) -> int:
        return sum(host.map_in_threads(lambda part: part + item, range(5), threads=2))

    assert list(host.map_in_threads(add_up, range(6), threads=2)) == [10 + 5 * item for item in range(6)]


def run_in_fork(work: Callable[[], bool]) -> bool:
    """True where a fork of this process does the work within a minute."""
    child = os.fork()
    if not child:
        os._exit(0 if work() else 1)
    ended, deadline = (0, 0), time.monotonic() + 60
    while ended == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    return ended == (child, 0)


def start_thread() -> bool:
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()
    return True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_has_threads_of_its_own() -> None:
    list(host.map_in_threads(abs, range(4), threads=2))
    if not run_in_fork(start_thread):
        pytest.skip("no fork of threads starts any here: qemu's emulation of one process does not")
    assert run_in_fork(lambda: list(host.map_in_threads(abs, [-1, -2, -3], threads=2)) == [1, 2, 3])


@pytest.mark.parametrize("cores", [1, 2])
def test_work_beside_gives_its_result_or_its_fault(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: cores)
    with host.work_beside(lambda: 7) as wait_for_result:
        assert wait_for_result() == 7

    def fail() -> int:
        raise ValueError("beside")

    with host.work_beside(fail) as wait_for_result, pytest.raises(ValueError, match="beside"):
        wait_for_result()


def test_work_beside_runs_at_the_same_time_and_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    barrier = threading.Barrier(2, timeout=60)
    done, here = [], threading.get_ident()

    def work() -> None:
        barrier.wait()
        time.sleep(0.01)
        with host.work_beside(threading.get_ident) as find_thread:
            assert find_thread() not in (here, threading.get_ident())
        done.extend(host.map_in_threads(lambda item: item, range(3)))

    with host.work_beside(work):
        barrier.wait()
        assert list(host.map_in_threads(lambda item: item, range(3))) == [0, 1, 2]
    assert done == [0, 1, 2]


def test_work_beside_takes_the_threads_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    with use_threads(3), host.work_beside(count_threads) as wait_for_result:
        assert wait_for_result() == 3


# ---- Threads of matrix products: one inside, as before afterwards, errors or not.


def threads() -> set[int]:
    """The numbers of threads, as the libraries themselves tell them."""
    return {library["num_threads"] for library in ThreadpoolController().select(user_api="blas").info()}


def test_threads_are_one_inside_and_as_before_afterwards() -> None:
    controller, usual = host._find_libraries()
    if not threads():
        pytest.skip("this numpy has no library whose threads can be set")
    with controller.limit(limits=2):
        before = threads()
        with host.use_blas_threads(one=True):
            with host.use_blas_threads(one=True):
                assert threads() == {1}
            assert threads() == {1}
            with host.use_blas_threads(one=False):
                assert threads() == {usual}
            assert threads() == {1}
        assert threads() == before
        with pytest.raises(ZeroDivisionError), host.use_blas_threads(one=True):
            raise ZeroDivisionError
        assert threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may bring another library")
def test_the_wheel_of_numpy_is_understood() -> None:
    if np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"] == "scipy-openblas":
        assert threads()
    with host.use_blas_threads(one=True):
        assert np.ones(3) @ np.ones(3) == 3


# ---- The kind of this machine's CPU, read from what Linux says of it.


def cpuinfo(*cores: str) -> str:
    return "".join(f"processor\t: {k}\nmodel name\t: some CPU\nflags\t\t: fpu sse {f}\n\n" for k, f in enumerate(cores))


@pytest.mark.parametrize(
    ("machine", "text", "kind"),
    [
        ("x86_64", cpuinfo("avx avx2 fma", "avx avx2 fma"), "avx2"),
        ("x86_64", cpuinfo("avx2 avx512f avx512_vnni"), "vnni"),
        ("x86_64", cpuinfo("avx2 avx_vnni"), "vnni"),
        ("x86_64", cpuinfo("avx2 avx512f avx512bw"), "avx2"),
        ("x86_64", cpuinfo("avx2 avx_vnni", "avx2"), "avx2"),
        ("x86_64", cpuinfo("avx"), "x86"),
        ("AMD64", "", "unknown"),
        ("x86_64", "", "unknown"),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd asimddp\n", "arm64"),
        ("arm64", "", "arm64"),
        ("riscv64", "processor\t: 0\nisa\t: rv64imafdc\n", "unknown"),
    ],
)
def test_flags_decide(machine: str, text: str, kind: str) -> None:
    assert host.classify_cpu(machine, text) == kind
    assert kind in CPU_KINDS


def test_this_machine_has_a_kind() -> None:
    assert detect_cpu() in CPU_KINDS
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        assert detect_cpu() != "unknown"
