"""Protocols that must fall: ours with one thing changed, and what others do.

Each variant is a small override of the shipped functions with a one-line description, and names the
promise that it breaks. If a variant survives a verification, the verification is too weak.
"""

from spec.variants.catalogue import VARIANTS
from spec.variants.variant import Variant

__all__ = ["VARIANTS", "Variant"]
