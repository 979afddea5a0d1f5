"""Which parameters are synced together, and after which inner steps. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, Protocol

from megatron_wsd.errors import ConfigError

_FIELD = "megatron_wsd.sync.fragments"
# The outermost numbered stack of a name: decoder.layers.3. of megatron-core, model.layers.3. of Hugging
# Face's decoders, transformer.h.3. of GPT-2, encoder.block.3. of T5, blocks.3. of others.
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)(?=\.|$)")


class ShardLike(Protocol):
    """A part of one parameter: what `plan_fragments` looks at is the same on every rank."""

    @property
    def name(self) -> str:
        """Name of the parameter in the model."""

    @property
    def global_numel(self) -> int:
        """Elements of the whole parameter."""


@dataclass(frozen=True)
class Fragment:
    """Parameters that are synced together.

    Attributes:
        name: for people: ``all``, ``layers 0, 3, 6``, ``layers 0-2``, or ``outside``.
        members: indices into the shards that were planned, ascending.
    """

    name: str
    members: tuple[int, ...]


def plan_fragments(
    shards: Sequence[ShardLike], fragments: int, order: Literal["strided", "sequential"] = "strided"
) -> list[Fragment]:
    """Cut a model into fragments by transformer layers.

    One fragment is the whole model. From two on they are fragments of layers, and whatever lies outside of
    the layers (embeddings, output layer, final norm) is one more, the last. Depends on names and global
    sizes alone, so every rank of every island draws the same plan.

    Args:
        shards: of all parameters that are trained, in any order.
        fragments: P.
        order: ``strided``: layer l goes to fragment l mod P, so each spans the depth of the model (the better
            one in Streaming DiLoCo); ``sequential``: neighbours together, cut so that the squares of the
            fragments' sizes add up to the least, which is as even as layers allow.

    Raises:
        ConfigError: P is above the number of layers, or the names tell of no layers at all.

    Reference:
        Streaming DiLoCo, arXiv 2501.18512, section 2.2.
    """
    if fragments < 1:
        raise ConfigError(_FIELD, "at least 1", fragments)
    if fragments == 1:
        return [Fragment("all", tuple(range(len(shards))))]
    layers: dict[tuple[str, int], list[int]] = {}
    outside: list[int] = []
    for i, shard in enumerate(shards):
        found = _LAYER.search(shard.name)
        if found is None:
            outside.append(i)
        else:
            layers.setdefault((shard.name[: found.start(1)], int(found[1])), []).append(i)
    if not layers:
        some = ", ".join(shard.name for shard in shards[:3])
        raise ConfigError(
            _FIELD,
            "1 for a model whose parameters are in no numbered layers",
            f"{fragments} for {len(shards)} parameters such as {some}",
            "Fragments follow names like layers.3.weight, h.3.weight or blocks.3.weight.",
        )
    if fragments > len(layers):
        raise ConfigError(
            _FIELD,
            f"at most {len(layers)}, the layers of this model",
            fragments,
            f"Set it to {len(layers)} or less; what lies outside of the layers is a fragment besides.",
        )
    stacks = list(dict.fromkeys(stack for stack, _ in layers))
    depth = sorted(layers, key=lambda layer: (stacks.index(layer[0]), layer[1]))
    if order == "strided":
        groups = [list(range(f, len(depth), fragments)) for f in range(fragments)]
    else:
        sizes = [sum(shards[i].global_numel for i in layers[layer]) for layer in depth]
        cuts = _even_cuts(sizes, fragments)
        groups = [list(range(a, b)) for a, b in pairwise(cuts)]
    plan = [Fragment(_name(g), _members(i for at in g for i in layers[depth[at]])) for g in groups]
    return plan + ([Fragment("outside", tuple(outside))] if outside else [])


def _members(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(indices))


def _name(group: list[int]) -> str:
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"layers {group[0]}-{group[-1]}"
    return f"layer{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}"


def _even_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Where to cut ``sizes`` into that many runs, none empty, so that the sum of squared sums is least."""
    before = [0, *accumulate(sizes)]
    count = len(sizes)
    # best[n]: least cost of the first n layers in the runs so far, and its cuts. The first of equals wins.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for part in range(1, parts + 1):
        ends = range(part, count - (parts - part) + 1)
        best = {
            end: min(
                (cost + (before[end] - before[start]) ** 2, [*cuts, end])
                for start, (cost, cuts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[count][1]


def plan_digest(plan: Sequence[Fragment], shards: Sequence[ShardLike]) -> int:
    """A non-negative int63 of a plan: equal where the same parameters are synced together, in turn."""
    told = [[(shards[i].name, shards[i].global_numel) for i in fragment.members] for fragment in plan]
    digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def peak_fraction(plan: Sequence[Fragment], shards: Sequence[ShardLike]) -> float:
    """Elements of the largest fragment over those of all: what is left of the peak traffic."""
    sizes = [sum(shards[i].global_numel for i in fragment.members) for fragment in plan]
    return max(sizes) / sum(sizes) if sum(sizes) else 1.0


class SyncPoints:
    """After which inner steps each fragment is synced.

    Fragment f of P' is due after the completed inner step n where n = offset_f modulo H, with

        offset_f = floor((f + 1) H / P')

    so each has a period of exactly H, whether or not P' divides H, and they take turns as evenly as whole
    steps allow. The last one is due at multiples of H, as an undivided model is. With more fragments than
    steps several are due together.

    Args:
        inner_steps: H, the period of every fragment.
        count: P', the fragments of the plan.

    Attributes:
        offsets: offset_f of each fragment, from 0 to H.
    """

    def __init__(self, inner_steps: int, count: int) -> None:
        self.inner_steps, self.count = inner_steps, count
        self.offsets = tuple((f + 1) * inner_steps // count for f in range(count))

    def due(self, n: int) -> list[int]:
        """The fragments that are due after the completed inner step ``n`` (from 1), ascending."""
        if n < 1:
            return []
        return [f for f, offset in enumerate(self.offsets) if (n - offset) % self.inner_steps == 0]

    def turns(self, f: int, n: int) -> int:
        """How often fragment ``f`` was due in the inner steps 1 to ``n``."""
        first = self.offsets[f] or self.inner_steps
        return max(0, (n - first) // self.inner_steps + 1)

    def describe(self) -> str:
        """One line to print: the period, and how far apart the sync points are."""
        every = f"every {self.inner_steps} steps" if self.inner_steps > 1 else "every step"
        if self.count == 1:
            return f"the whole model syncs {every}"
        together = Counter(offset % self.inner_steps for offset in self.offsets)
        points = sorted(together)
        wrapped = [*points, points[0] + self.inner_steps]
        gaps = sorted({b - a for a, b in pairwise(wrapped)})
        apart = f"sync points {_or(gaps)} step{'' if gaps == [1] else 's'} apart"
        crowd = sorted(set(together.values()))
        each = "" if crowd == [1] else f", {_or(crowd)} fragments at each"
        return f"each fragment syncs {every}; {self.count} fragments, {apart}{each}"


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
