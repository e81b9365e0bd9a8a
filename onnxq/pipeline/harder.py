"""What effort `high` adds to the sweep: a longer search for levels of few bits, and roundings that others hand in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxq.data import Dataset
from onnxq.graph import ModelLike, attach_weights
from onnxq.passes.handed import registered, taken
from onnxq.passes.sweep import NARROW_BITS, Swept, sweep
from onnxq.plan import Plan
from onnxq.progress import Progress
from onnxq.runtime import Feeds
from onnxq.sites import Role

Score = Callable[[Plan], float]


def harder(
    proto: ModelLike,
    score: Score,
    before: Plan,
    done: Swept,
    reached: float,
    few: Dataset,
    others: Sequence[Feeds],
    progress: Progress,
) -> tuple[Plan, float, str]:
    """The better plan, its score and what to say of it; each attempt is kept only if the score rises.

    before: the plan that the sweep began with; done: what it made of it, which scored `reached`. few, others: the
    samples and their other views, as of `sweep`.
    """
    plan, told = done.plan, ""
    if any(s.role is Role.WEIGHT and s.values is not None and s.spec.bits <= NARROW_BITS for s in plan.sites):
        nodes = frozenset(one.node for one in done.done)
        longer = sweep(proto, before, few.samples(), others=others, nodes=nodes, thorough=True, progress=progress).plan
        now = score(longer)
        told = f"; levels searched longer: {reached:.1f} to {now:.1f} dB{'' if now > reached else ', not kept'}"
        if now > reached:
            plan, reached = longer, now
    for name, rounder in registered().items():
        asked = kept = 0
        begun, moved = reached, ""
        for block in rounder(attach_weights(proto), plan, list(few.samples())):
            asked += 1
            tried, lines = taken(plan, block)
            now = score(tried)
            if now > reached:
                plan, reached, kept = tried, now, kept + 1
                moved += "".join(f"; {line}" for line in lines)
        told += f"; {name}: {kept} of {asked} blocks kept, {begun:.1f} to {reached:.1f} dB{moved}"
    return plan, reached, told
