"""Where a pass took another scale than the observer of the configuration gave, in words."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from onnxq.plan import Plan
from onnxq.sites import Role
from onnxq.spec import ObserverSpec

MEASURED = (Role.ACTIVATION, Role.OUTPUT)
# Sites that a line names for each observer; a network has hundreds.
_SHOWN = 4


def list_replaced(before: Plan, after: Plan, roles: Collection[Role], why: str) -> str:
    """The sites of these roles whose scale changed, by the observer that gave the one before; "" where none did.

    why: the reason, and how to keep the observer's scales.
    """
    held = {site.site: site for site in before.sites}
    found: dict[str, list[str]] = {}
    for site in after.sites:
        old = held.get(site.site)
        if site.role not in roles or old is None or old.qparams is None or site.qparams is None:
            continue
        if not np.array_equal(old.qparams.scale, site.qparams.scale):
            found.setdefault(name_observer(site.observer), []).append(str(site.site))
    parts = []
    for observer, names in found.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{observer} at {', '.join(names[:_SHOWN])}{more}")
    return f"in place of the observer {', of '.join(parts)}: {why}" if parts else ""


def name_observer(observer: ObserverSpec) -> str:
    """percentile (percentile 99.9)."""
    options = ", ".join(f"{key} {value}" for key, value in observer.options)
    return f"{observer.name} ({options})" if options else observer.name
