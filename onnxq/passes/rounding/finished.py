"""Operators that an earlier run has rounded, from which an interrupted one goes on.

The key of each is chained to those of the operators before it, whose rounding its own depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxq.arrays import Array
from onnxq.graph import ModelLike
from onnxq.plan import Plan, SitePlan, to_json
from onnxq.runtime import Feeds
from onnxq.runtime.crew import hash_feeds, hash_model, hash_parts, hash_run
from onnxq.spec import QParams
from onnxq.workers import Journal, register_packed


@register_packed
@dataclass(frozen=True, eq=False)
class OperatorNumbers:
    """The numbers that rounding found for one operator.

    count: positions seen. scarce: other samples were looked at too. refitted: the weight was. qparams, values: of its
    site; None: as they were. bias: float64 [outputs]; None: there is no place for one.
    """

    count: int
    scarce: bool
    refitted: bool = False
    qparams: QParams | None = None
    values: Array | None = None
    bias: Array | None = None

    def put_into(self, site: SitePlan) -> SitePlan:
        """The site of the weight with these numbers."""
        return site if self.values is None else replace(site, qparams=self.qparams, values=self.values)


class FinishedOperators:
    """The journal's entries of one rounding. journal: None: there are none, and nothing is written.

    proto, plan, samples, others: of the rounding. options: all else that its result depends on, in a text.
    """

    def __init__(
        self,
        journal: Journal | None,
        proto: ModelLike,
        plan: Plan,
        samples: Sequence[Feeds],
        others: Sequence[Feeds],
        options: str,
    ) -> None:
        self._journal = journal
        self._key = "" if journal is None else _hash_rounding(proto, plan, samples, others, options)

    def read_next(self, node: str) -> OperatorNumbers | None:
        """The numbers of the next operator; None where it is not finished."""
        if self._journal is None:
            return None
        self._key = hash_parts(self._key.encode(), node.encode())
        numbers = self._journal.read(self._key)
        return numbers if isinstance(numbers, OperatorNumbers) else None

    def write_numbers(self, numbers: OperatorNumbers) -> None:
        """Keep the numbers of the operator that `read_next` was asked for last."""
        if self._journal is not None:
            self._journal.write(self._key, numbers)


def _hash_rounding(
    proto: ModelLike, plan: Plan, samples: Sequence[Feeds], others: Sequence[Feeds], options: str
) -> str:
    # Without names of files and figures for people, which change nothing.
    bare = replace(
        plan, model="", data="", placement=None, attention=None, refusals=(), left_float=(), warnings=(), contents=None
    )
    digests = [" ".join(map(hash_feeds, some)) for some in (samples, others)]
    return hash_run("rounding", hash_model(proto), to_json(bare), *digests, options)
