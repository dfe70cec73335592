"""Lengths in, plan out: which documents share a pack. Integers only; nothing here knows tokens."""

from hf_neat_packing.planning.balance import balanced_order, imbalance, pack_costs
from hf_neat_packing.planning.bound import lower_bound
from hf_neat_packing.planning.plan import PackingPlan
from hf_neat_packing.planning.planner import Strategy, plan_packing
from hf_neat_packing.planning.policies import Accounting, OnEmpty, OnOverlong, TruncateSide
from hf_neat_packing.planning.pool import PoolPacker
from hf_neat_packing.planning.report import PackingReport

__all__ = [
    "Accounting",
    "OnEmpty",
    "OnOverlong",
    "PackingPlan",
    "PackingReport",
    "PoolPacker",
    "Strategy",
    "TruncateSide",
    "balanced_order",
    "imbalance",
    "lower_bound",
    "pack_costs",
    "plan_packing",
]
