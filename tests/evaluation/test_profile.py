"""Profiles as values: groups by kind, noise as decibels."""

from __future__ import annotations

import math

import pytest

from onnxq.evaluation.profile import KINDS, GroupCost, Profile, noise_to_db


def group(kind: str, name: str) -> GroupCost:
    return GroupCost(kind=kind, name=name, ops=(), sites=(), isolated_db=30.0, leave_one_out_db=20.0, gain_db=1.0)


def test_groups_of_a_kind_keep_their_order() -> None:
    groups = tuple(group(kind, f"{kind}{k}") for k in (2, 0, 1) for kind in KINDS)
    found = Profile(sqnr_db=10.0, samples=1, outputs=(), groups=groups)
    for kind in KINDS:
        assert [one.name for one in found.of(kind)] == [f"{kind}{k}" for k in (2, 0, 1)]
    assert found.of("nodes") == ()


@pytest.mark.parametrize(
    ("noise", "db"),
    [(1.0, 0.0), (0.01, 20.0), (100.0, -20.0), (0.0, math.inf), (math.inf, -math.inf), (math.nan, -math.inf)],
)
def test_noise_in_decibels(noise: float, db: float) -> None:
    assert noise_to_db(noise) == pytest.approx(db)
