"""Files of paced devices: YAML in, PacedDevices out (costmodel/paced.py has the formulas).

    name: lab
    paced: true                        # tells such a file from a cluster file
    nodes: 2
    devices_per_node: 4
    memory_gib: 0.25
    ops:                               # the first pattern that matches counts; the last one has to match everything
      - {op: "aten.linear*", base_ms: 2, gflops_per_s: 0.05, backward_input: 1, backward_weight: 1, multiple: 8, odd_factor: 1.5}
      - {op: "*", base_ms: 0.2, mb_per_s: 40}
    links:                             # from the innermost out; the last one joins all ranks
      - {name: board, domain: 4, latency_ms: 1, mb_per_s: 4}
      - {name: wire, latency_ms: 4, mb_per_s: 1, shared: true}
    slowdowns: {5: 1.4}                # rank: factor
    optimizer: {base_ms: 2, ns_per_element: 20}

`gb`, `mb` are 1e9 and 1e6 bytes, `gib` 2**30; `gflops` 1e9. A rate that is left out does not count. `backward_input` and `backward_weight` are
factors of the forward pass (default 1). `domain` defaults to all ranks in the last link. A link that is `shared` has one rate for all of
its ranks (default: each has its own).
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodel.forms import ClusterFileError, Count, Positive, Strict, validate
from costmodel.paced import LinkCost, OpCost, PacedDevices

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class _Op(Strict):
    op: str
    base_ms: NotNegative
    gflops_per_s: Positive | None = None
    mb_per_s: Positive | None = None
    backward_input: NotNegative = 1.0
    backward_weight: NotNegative = 1.0
    multiple: Count = 1
    odd_factor: Factor = 1.0


class _Link(Strict):
    name: str
    domain: Count | None = None
    latency_ms: NotNegative
    mb_per_s: Positive
    shared: bool = False


class _Optimizer(Strict):
    base_ms: NotNegative = 0.0
    ns_per_element: NotNegative = 0.0


class _File(Strict):
    name: str
    paced: Literal[True]
    nodes: Count
    devices_per_node: Count
    memory_gib: Positive
    ops: Annotated[list[_Op], Field(min_length=1)]
    links: Annotated[list[_Link], Field(min_length=1)]
    slowdowns: dict[Annotated[int, Field(ge=0, strict=True)], Positive] = Field(default_factory=dict)
    optimizer: _Optimizer = Field(default_factory=_Optimizer)


def is_paced(content: Any) -> bool:
    """Whether a file's content describes paced devices."""
    return isinstance(content, dict) and "paced" in content


def read(content: Any, file: str) -> PacedDevices:
    """Raises ClusterFileError naming the file and the key."""
    form = validate(_File, content, file, (_File, _Op, _Link, _Optimizer))
    total = form.nodes * form.devices_per_node
    if form.ops[-1].op != "*":
        raise ClusterFileError(
            file, f"ops.{len(form.ops) - 1}.op", f"the last pattern has to be '*', so that every operator has a time; found {form.ops[-1].op!r}"
        )
    links = []
    for i, link in enumerate(form.links):
        domain = link.domain or (total if i == len(form.links) - 1 else 0)
        if not domain:
            raise ClusterFileError(file, f"links.{i}.domain", "a link that is not the last one needs the number of ranks that it joins")
        links.append(LinkCost(link.name, domain, link.latency_ms * 1e-3, link.mb_per_s * 1e6, link.shared))
    if links[-1].domain < total:
        raise ClusterFileError(file, f"links.{len(links) - 1}.domain", f"it joins {links[-1].domain} of {total} ranks: leave domain out in the last link")
    if any(b.domain <= a.domain or b.domain % a.domain for a, b in itertools.pairwise(links)):
        raise ClusterFileError(file, "links", f"each domain has to be a multiple of the one before it, found {', '.join(str(link.domain) for link in links)}")
    beyond = [rank for rank in form.slowdowns if rank >= total]
    if beyond:
        raise ClusterFileError(file, f"slowdowns.{beyond[0]}", f"there are {total} ranks, 0 to {total - 1}")
    return PacedDevices(
        name=form.name,
        num_nodes=form.nodes,
        devices_per_node=form.devices_per_node,
        memory_bytes=int(form.memory_gib * 2**30),
        ops=tuple(_cost(op) for op in form.ops),
        links=tuple(links),
        slowdowns=tuple(sorted(form.slowdowns.items())),
        optimizer_base_s=form.optimizer.base_ms * 1e-3,
        optimizer_s_per_element=form.optimizer.ns_per_element * 1e-9,
    )


def _cost(form: _Op) -> OpCost:
    flops_per_s = form.gflops_per_s * 1e9 if form.gflops_per_s else math.inf
    bytes_per_s = form.mb_per_s * 1e6 if form.mb_per_s else math.inf
    return OpCost(form.op, form.base_ms * 1e-3, flops_per_s, bytes_per_s, form.backward_input, form.backward_weight, form.multiple, form.odd_factor)
