"""Where a variant does something else in the real loader than in the closed system, on its way to
the same fall. (The shipped protocol does the same in both.)"""

from __future__ import annotations

PARTING_VARIANTS = {
    "idle-skips-counts": (
        "the totals that the idle rank makes up have no weight, and the loader divides by that for "
        "the loss scale: it cannot make the idle step, and goes on without it"
    ),
}
"""By name, with the reason."""
