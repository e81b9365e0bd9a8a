"""Runs in several threads: order, faults and how far they run ahead do not depend on the number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.numerics import machine
from onnxq.numerics.machine import begin_work, count_runs, map_in_threads, read_ahead, share_cores


@given(items=st.lists(st.integers()), threads=st.integers(0, 4))
def test_results_come_in_the_order_of_the_items(items: list[int], threads: int) -> None:
    def work(item: int) -> int:
        time.sleep(item % 3 / 10_000)
        return item + 1

    assert list(map_in_threads(work, items, threads=threads)) == [item + 1 for item in items]


def test_as_many_run_at_a_time_as_there_are_threads() -> None:
    # Both wait for each other: one thread alone would never end.
    barrier = threading.Barrier(2, timeout=60)
    assert sorted(map_in_threads(lambda _: barrier.wait(), range(2), threads=2)) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_fault_is_raised_in_the_place_of_its_result(threads: int) -> None:
    def work(item: int) -> int:
        if item == 2:
            raise ValueError(f"item {item}")
        return item

    results = map_in_threads(work, range(10), threads=threads)
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

    results = map_in_threads(lambda item: item, items(), threads=threads)
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
    assert share_cores(runs) == share


@pytest.mark.parametrize(
    ("cores", "threads", "runs"), [(2, 0, 2), (16, 0, 2), (16, 4, 4), (2, 8, 2), (1, 0, 1), (1, 1, 1)]
)
def test_two_runs_fill_the_gaps_of_each_other(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, runs: int
) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: cores)
    assert count_runs(threads) == runs


def test_work_that_is_begun_goes_on_beside_the_caller() -> None:
    # Both wait for each other.
    barrier = threading.Barrier(2, timeout=60)
    wait = begin_work(barrier.wait)
    assert {barrier.wait(), wait()} == {0, 1}
    # The second answer is the first.
    assert wait() == wait()


def test_a_fault_of_work_that_is_begun_is_raised_where_it_is_waited_for() -> None:
    wait = begin_work(int, "no number")
    with pytest.raises(ValueError, match="no number"):
        wait()


def test_the_next_item_is_made_while_the_caller_works_with_one() -> None:
    made, barrier = [], threading.Barrier(2, timeout=60)

    def items() -> Iterator[int]:
        for item in range(4):
            if item:
                barrier.wait()
            made.append(item)
            yield item
        raise ValueError("the end")

    ahead = read_ahead(items())
    for item in range(3):
        assert next(ahead) == item
        assert made == list(range(item + 1))
        barrier.wait()
    assert next(ahead) == 3
    with pytest.raises(ValueError, match="the end"):
        next(ahead)
