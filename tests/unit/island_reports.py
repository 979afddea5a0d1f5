"""Reports of islands for the tests of what is decided from them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megatron_wsd.diloco.agree import Offer, Report

_OF_OFFER = {f.name for f in fields(Offer)}


def offer(**changes: int) -> Offer:
    """Of a fragment after 5 commits, none of them missed; with a fresh contribution of 10 steps."""
    made = Offer(version=5, last_turn=5, turn=6, contributes=1, base=5, steps=10, tokens=100, cursor=60)
    return replace(made, **changes)


def empty(**changes: int) -> Offer:
    """The same without a contribution."""
    return replace(Offer(version=5, last_turn=5, turn=6), **changes)


def report(island: int, *offers: Offer, **changes: Any) -> Report:
    """Of an island after 5 rounds; without ``offers`` it has one fragment, to which changes may belong."""
    own = {name: changes.pop(name) for name in list(changes) if name in _OF_OFFER}
    assert not (own and offers)
    base = Report(
        island=island,
        outer_step=5,
        digest=111,
        config=7,
        data=3,
        ranks=2,
        settled=1,
        inner_step=60,
        plan=9,
        offers=offers or (offer(**own),),
    )
    return replace(base, **changes)
