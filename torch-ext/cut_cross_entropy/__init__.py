"""Cross-entropy of ``e @ c.T`` against integer targets without ever forming the [N, V] logits."""

from . import layers, reference
from .functional import TokenStats, linear_cross_entropy, linear_token_stats
from .planner import Plan, plan

__all__ = ["Plan", "TokenStats", "layers", "linear_cross_entropy", "linear_token_stats", "plan", "reference"]
