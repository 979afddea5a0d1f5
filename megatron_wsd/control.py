"""Orders to a running job, dropped as files: begin a decay, withdraw one, change the schedule.

`megatron-wsd decay-now` writes ``RUN/control/order.json``. An island that sees it proposes it to the others
in the next outer round; the round that commits makes it binding for all, at one step. No port is opened and
no signal is sent. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_wsd.errors import ConfigError
from megatron_wsd.files import write_json_atomic
from megatron_wsd.schedule.plan import OVERRIDABLE


class Order(BaseModel):
    """What the operator wants.

    Attributes:
        kind: ``decay`` begins one; ``cancel`` withdraws one that has not begun; ``override`` changes fields
            of the schedule.
        fields: of ``override``: name in scheduler.params to value.
        length: of the decay, in inner steps.
        shape: of the decay.
        min_lr_ratio: at its end, of the peak.
        data_mix: of the decay, a name in data.mixes; None: ``decay`` if there is one, else no change.
        at: inner step at which it begins; None: as soon as all islands have agreed.
        then: stop after it, or go back to the stable phase.
        nonce: makes two equal orders different ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["decay", "cancel", "override"] = "decay"
    fields: dict[str, Any] = Field(default_factory=dict)
    length: int = Field(0, ge=0)
    shape: str = "one_minus_sqrt"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    data_mix: str | None = None
    at: int | None = Field(None, ge=0)
    then: Literal["stop", "stable"] = "stop"
    nonce: str = ""

    @property
    def number(self) -> int:
        """A positive int63 that tells this order from others."""
        text = self.model_dump_json().encode()
        return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1) | 1


def override_order(given: Sequence[str], nonce: str) -> Order:
    """The order that ``--override schedule.FIELD=VALUE`` stands for.

    Raises:
        ConfigError: not of that form, or a field that cannot be changed.
    """
    fields: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        part, _, field = name.partition(".")
        if not equals or part != "schedule" or field not in OVERRIDABLE:
            near = difflib.get_close_matches(field, OVERRIDABLE, n=1)
            raise ConfigError(
                "--override",
                f"schedule.FIELD=VALUE with one of {', '.join(OVERRIDABLE)}",
                text,
                f"Did you mean schedule.{near[0]}?" if near else "",
            )
        try:
            fields[field] = json.loads(value)
        except ValueError:
            fields[field] = value
    return Order(kind="override", fields=fields, nonce=nonce)


class ControlFolder:
    """``RUN/control``: the pending order, and those that the islands have committed.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._pending = run_dir / "control" / "order.json"
        self._accepted = run_dir / "control" / "accepted.json"

    def pending(self) -> Order | None:
        """The order that waits for a round; None if there is none.

        Raises:
            ConfigError: the file is no order.
        """
        try:
            text = self._pending.read_text()
        except OSError:
            return None
        try:
            return Order.model_validate_json(text)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            remedy = "Remove the file, or write it with megatron-wsd decay-now."
            raise ConfigError(f"{self._pending}: {where}", first["msg"], first.get("input"), remedy) from None

    def propose(self, order: Order) -> None:
        """Drop an order.

        Raises:
            ConfigError: another one waits already; orders are never stacked.
        """
        if self.pending() is not None:
            raise ConfigError(
                "decay-now",
                "no order that waits already",
                f"one in {self._pending}",
                "It is taken in the next outer round; --cancel withdraws it.",
            )
        self._pending.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._pending, order.model_dump(mode="json"))

    def withdraw(self) -> bool:
        """Remove the pending order; False if there was none."""
        try:
            self._pending.unlink()
        except FileNotFoundError:
            return False
        return True

    def settle(self, orders: list[dict[str, Any]]) -> None:
        """Note what has been committed, and remove the pending order if it is among it."""
        self._accepted.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._accepted, orders)
        try:
            pending = self.pending()
        except ConfigError:
            return
        if pending is not None and any(entry["number"] == pending.number for entry in orders):
            self.withdraw()

    def accepted(self) -> list[dict[str, Any]]:
        """The orders that were committed, oldest first, each with ``step`` and, if refused, ``refused``."""
        try:
            return list(json.loads(self._accepted.read_text()))
        except (OSError, ValueError):
            return []
