"""Faults on request, so that anyone can see a run survive them.

    fail(island=1, at="exchange", round=3, how="kill")

as a text, in ``megatron-wsd launch --inject`` or in the environment, separated by ``;``:

    MEGATRON_WSD_INJECT='island=1 at=exchange round=3 how=kill'

Without that variable nothing here does anything. No torch here.
"""

from __future__ import annotations

import difflib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_wsd.errors import ConfigError
from megatron_wsd.metrics import say

if TYPE_CHECKING:
    import torch

VARIABLE = "MEGATRON_WSD_INJECT"
FLAG = "--inject"

POINTS = {
    "capture": "the pseudo-gradient has been taken",
    "offer": "before the contribution goes to the outer half",
    "agree": "before the islands tell each other their numbers",
    "before_exchange": "all have agreed, no payload has moved",
    "within_exchange": "between two messages of payload",
    "after_exchange": "all payload has come, nothing is voted on yet",
    "step": "the vote was won, the anchor has not moved",
    "commit": "before the island says that all went well",
    "publish": "the anchor has moved, training has not been told",
    "adopt": "before the island takes the new anchor",
    "checkpoint": "before the outer state is written",
    "healing": "while outer state travels to an island that lacks it",
}
ALIASES = {"exchange": "within_exchange"}
KINDS = {
    "kill": "the process kills itself, as a machine that loses its power would",
    "hang": "the thread that comes by sleeps for ever; heartbeats go on",
    "exception": "the thread that comes by raises InjectedFault",
    "nan": "a NaN is written into the pseudo-gradient",
    "slow": "the thread that comes by sleeps for some seconds",
}
NAN_POINTS = ("capture",)  # where there is a tensor that an island's own trouble could have spoilt
SLOW_S = 3.0


class InjectedFault(RuntimeError):
    """The exception of a fault that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It happens once: in its round, or in the next one that comes by its point at all.

    Attributes:
        island: whose.
        at: one of `POINTS`; ``exchange`` is taken for ``within_exchange``.
        round: outer rounds that are committed when the process comes by, so the first round is 0.
        how: one of `KINDS`.
        rank: of the island; None for all of them.
        seconds: of ``slow``, 3 by default; None for all others.

    Raises:
        ConfigError: an unknown word, or words that do not go together.
    """

    island: int
    at: str
    round: int
    how: str
    rank: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", ALIASES.get(self.at, self.at))
        _known("at", self.at, POINTS, [*POINTS, *ALIASES])
        _known("how", self.how, KINDS, list(KINDS))
        if self.how == "nan" and self.at not in NAN_POINTS:
            raise ConfigError(
                f"{FLAG} how=nan",
                f"at={' or at='.join(NAN_POINTS)}, where there is a tensor",
                f"at={self.at}",
            )
        for name in ("island", "round", "rank"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{FLAG} {name}", "at least 0", value)
        if self.how == "slow":
            object.__setattr__(self, "seconds", SLOW_S if self.seconds is None else self.seconds)
            if not 0 < (self.seconds or 0) < float("inf"):
                raise ConfigError(f"{FLAG} seconds", "a number of seconds above 0", self.seconds)
        elif self.seconds is not None:
            raise ConfigError(f"{FLAG} seconds", "how=slow with it", f"how={self.how}")

    def __str__(self) -> str:
        text = f"island={self.island} at={self.at} round={self.round} how={self.how}"
        text += f" rank={self.rank}" if self.rank is not None else ""
        return text + (f" seconds={self.seconds:g}" if self.seconds is not None else "")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From a sentence such as ``island=1 at=exchange round=3 how=kill``; what `str` gives comes back.

        Raises:
            ConfigError: a word that is none, is missing or comes twice; with the nearest right one.
        """
        kinds = {"island": int, "at": str, "round": int, "how": str, "rank": int, "seconds": float}
        values: dict[str, int | float | str] = {}
        for word in text.split():
            name, equals, value = word.partition("=")
            _known("", name, kinds, list(kinds))
            if not equals or name in values:
                raise ConfigError(FLAG, f"{name}=VALUE once", repr(text))
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise ConfigError(f"{FLAG} {name}", "a number", value) from None
        missing = [name for name in ("island", "at", "round", "how") if name not in values]
        if missing:
            example = "'island=1 at=exchange round=3 how=kill'"
            raise ConfigError(FLAG, f"a sentence like {example}", f"{text!r}, without {', '.join(missing)}")
        return cls(**values)  # type: ignore[arg-type]


def fail(
    *, island: int, at: str, round: int, how: str, rank: int | None = None, seconds: float | None = None
) -> Fault:
    """A `Fault`; reads better in a test."""
    return Fault(island=island, at=at, round=round, how=how, rank=rank, seconds=seconds)


def parse_faults(text: str) -> list[Fault]:
    """From sentences separated by ``;``.

    Raises:
        ConfigError: one of them is none.
    """
    return [Fault.parse(sentence) for sentence in text.split(";") if sentence.strip()]


def join_faults(faults: Iterable[Fault]) -> str:
    """What `parse_faults` reads."""
    return "; ".join(map(str, faults))


class Faults:
    """The faults of one rank that are still to come.

    Args:
        faults: of all islands and ranks; those of others are left out.
        island: number of this island.
        rank: of this process in it.
    """

    def __init__(self, faults: Iterable[Fault] = (), island: int = 0, rank: int = 0) -> None:
        self._rank = rank
        self._left = [f for f in faults if f.island == island and f.rank in (None, rank)]

    @classmethod
    def from_environ(cls, island: int, rank: int, environ: Mapping[str, str] | None = None) -> Faults:
        """Those that ``MEGATRON_WSD_INJECT`` asks for; mostly none.

        Raises:
            ConfigError: it holds a sentence that is none.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        return cls(parse_faults(text), island, rank) if text else NO_FAULTS

    def here(self, point: str, round: int, tensor: torch.Tensor | None = None) -> None:
        """To be called where the process comes by `point`, one of `POINTS`; costs nothing without faults.

        Args:
            point: where the process is.
            round: outer rounds that are committed by now.
            tensor: any shape, into whose first element a fault of kind ``nan`` writes.

        Raises:
            InjectedFault: asked for by a fault of kind ``exception``.
        """
        if not self._left:
            return
        for fault in [f for f in self._left if f.at == point and f.round <= round]:
            self._left.remove(fault)
            say(f"injected on rank {self._rank}, round {round}: {fault}")
            _happen(fault, tensor)


def _happen(fault: Fault, tensor: torch.Tensor | None) -> None:
    if fault.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.how == "exception":
        raise InjectedFault(str(fault))
    elif fault.how == "nan":
        if tensor is not None:
            tensor.view(-1)[:1].fill_(float("nan"))  # a rank whose shard is empty has nothing to spoil
    elif fault.how == "slow":
        time.sleep(fault.seconds or SLOW_S)
    else:
        while True:
            time.sleep(3600)


NO_FAULTS = Faults()


def _known(name: str, word: str, known: Iterable[str], offered: list[str]) -> None:
    if word not in known:
        near = difflib.get_close_matches(word, offered, n=1, cutoff=0.5)
        remedy = f"Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{FLAG} {name}".strip(), f"one of {', '.join(offered)}", repr(word), remedy)
