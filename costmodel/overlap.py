"""Compute beside a collective: the collective's kernels take processors and memory bandwidth from it.

While q seconds of traffic run, compute of c seconds alone advances at 1 / slowdown of its pace:

    seconds = max(q, c + (1 - 1 / slowdown) q)

Never less than the larger of the two, nor more than their sum. It grows with both and is convex, so that the seconds of several stages are together at least
those of their sums: what bounds c and q from below bounds the seconds. (Miao et al. 2022, Galvatron, profile such a factor; ours and where it comes from:
costmodel/data/priors.json.)
"""

from __future__ import annotations


def beside_s(compute_s: float, traffic_s: float, slowdown: float) -> float:
    """Seconds until both are done. Formula: the module's text."""
    return max(traffic_s, compute_s + slowed_s(traffic_s, slowdown))


def slowed_s(traffic_s: float, slowdown: float) -> float:
    """Seconds by which compute that outlasts `traffic_s` of traffic beside it comes later."""
    return (1 - 1 / slowdown) * traffic_s
