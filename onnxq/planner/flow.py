"""Minimum s-t cuts of small networks, deterministic."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class FlowNetwork:
    """A capacitated directed graph with Dinic's maximum flow (Dinic 1970)."""

    names: dict[Hashable, int] = field(default_factory=dict)
    heads: list[list[int]] = field(default_factory=list)
    to: list[int] = field(default_factory=list)
    cap: list[float] = field(default_factory=list)

    def vertex(self, name: Hashable) -> int:
        """The number of a vertex, which is added with its first use."""
        if name not in self.names:
            self.names[name] = len(self.heads)
            self.heads.append([])
        return self.names[name]

    def edge(self, a: Hashable, b: Hashable, capacity: float) -> None:
        """Add an edge; one without capacity is left out."""
        if capacity <= 0:
            return
        u, v = self.vertex(a), self.vertex(b)
        for source, sink, amount in ((u, v, capacity), (v, u, 0.0)):
            self.heads[source].append(len(self.to))
            self.to.append(sink)
            self.cap.append(amount)

    def source_side(self, source: Hashable, sink: Hashable) -> set[int]:
        """The vertices still reachable from `source` once the flow is maximal."""
        s, t = self.vertex(source), self.vertex(sink)
        while True:
            level = self._levels(s)
            if t not in level:
                return set(level)
            position = [0] * len(self.heads)
            while self._augment(s, t, level, position):
                pass

    def _levels(self, s: int) -> dict[int, int]:
        level = {s: 0}
        queue = [s]
        for u in queue:
            for e in self.heads[u]:
                if self.cap[e] > 1e-9 and self.to[e] not in level:
                    level[self.to[e]] = level[u] + 1
                    queue.append(self.to[e])
        return level

    def _augment(self, s: int, t: int, level: dict[int, int], position: list[int]) -> bool:
        """One path of the level graph, followed with a stack so that deep models do not overflow it."""
        path: list[int] = []
        u = s
        while u != t:
            while position[u] < len(self.heads[u]):
                e = self.heads[u][position[u]]
                if self.cap[e] > 1e-9 and level.get(self.to[e], -1) == level[u] + 1:
                    break
                position[u] += 1
            else:
                if not path:
                    return False
                u = self.to[path.pop() ^ 1]
                position[u] += 1
                continue
            path.append(e)
            u = self.to[e]
        amount = min(self.cap[e] for e in path)
        for e in path:
            self.cap[e] -= amount
            self.cap[e ^ 1] += amount
        return True
