"""Orders to a running job, dropped as files: begin a decay, withdraw one, change the schedule.

`megatron-wsd decay-now` writes ``RUN/control/order.json``. An island that sees it proposes it to the others
in the next outer round; the round that commits makes it binding for all, at one step. No port is opened and
no signal is sent. A file that is no order of this run never gets that far: it becomes ``order.refused.json``,
with the reason, and the run goes on untouched. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_wsd.config import load_config
from megatron_wsd.config.keys import words_of
from megatron_wsd.errors import ConfigError
from megatron_wsd.files import write_json_atomic
from megatron_wsd.rundir import RunDir
from megatron_wsd.schedule.fields import naming
from megatron_wsd.schedule.plan import OVERRIDABLE


class Order(BaseModel):
    """What the operator wants.

    Attributes:
        kind: ``decay`` begins one; ``cancel`` withdraws one that has not begun; ``override`` changes fields
            of the schedule.
        fields: of ``override``: name in scheduler.params to value.
        length: of the decay, in inner steps of the run.
        shape: of the decay.
        min_lr_ratio: at its end, of the peak.
        data_mix: of the decay, a name in data.mixes; None: ``decay`` if there is one, else no change.
        at: step of the run at which it begins; None: as soon as all islands have agreed.
        then: stop after it, or go back to the stable phase.
        run: id of the run that it was dropped for; None: whichever it is.
        nonce: makes two equal orders different ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Literal["decay", "cancel", "override"] = "decay"
    fields: dict[str, Any] = Field(default_factory=dict)
    length: int = Field(0, ge=0)
    shape: str = "one_minus_sqrt"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    data_mix: str | None = None
    at: int | None = Field(None, ge=0)
    then: Literal["stop", "stable"] = "stop"
    run: str | None = None
    nonce: str = ""

    @property
    def number(self) -> int:
        """A positive int63 that tells this order from others."""
        text = self.model_dump_json(exclude={"run"}).encode()
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


def told(entry: Mapping[str, Any]) -> str:
    """An order in words, without the step at which it was committed; steps are those of the run.

    Args:
        entry: the fields of an `Order`; of one that was committed with ``step`` and, if it was refused,
            ``refused``.
    """
    done = "step" in entry and "refused" not in entry
    if entry["kind"] == "cancel":
        what = "the decay that had not begun is withdrawn" if done else "withdrawal of a decay"
    elif entry["kind"] == "override":
        what = "schedule changed: " if done else "change of the schedule: "
        what += ", ".join(f"{k} = {v}" for k, v in entry["fields"].items())
    else:
        begins = entry.get("step") if entry["at"] is None else entry["at"]
        what = f"decay of {entry['length']} steps ({entry['shape']})"
        what += " from where all islands agree" if begins is None else f" from step {begins}"
        what += f", data mix {entry['data_mix']!r}" if entry["data_mix"] else ""
        what += ", then stable" if entry["then"] == "stable" else ""
    return f"{what}: refused: {entry['refused']}" if "refused" in entry else what


# How `decay-now` calls what the schedule calls otherwise.
_OPTIONS = {
    "decay_steps": "--steps",
    "decay_shape": "--shape",
    "decay_start": "--at",
    "min_lr_ratio": "--min-lr-ratio",
    "begin_decay": "decay-now",
    "cancel_decay": "--cancel",
}


@contextmanager
def as_typed(kind: str) -> Iterator[None]:
    """A ScheduleError about an order names what the operator typed.

    Args:
        kind: of the order; ``branch`` for the decay of one.
    """
    branch = {"decay_steps": "--decay-steps", "begin_decay": "branch"} if kind == "branch" else {}
    override = kind == "override"
    with naming({} if override else _OPTIONS | branch, prefix="--override schedule." if override else ""):
        yield


class ControlFolder:
    """``RUN/control``: the pending order, and those that the islands have committed.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run = RunDir(run_dir)
        self._pending = run_dir / "control" / "order.json"
        self._refused = run_dir / "control" / "order.refused.json"
        self._accepted = run_dir / "control" / "accepted.json"

    def pending(self) -> Order | None:
        """The order that waits for a round; None if there is none.

        A file that is no json is left alone, since somebody may be writing it still. One that is whole but no
        order of this run, or one that was committed before, becomes ``order.refused.json``.

        Raises:
            ConfigError: there is such a file, and why it is none.
        """
        try:
            content = self._pending.read_bytes()
        except OSError:
            return None
        try:
            order = Order.model_validate_json(content)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join([str(self._pending), *(str(part) for part in first["loc"])])
            if first["type"] == "json_invalid":
                remedy = "If nobody is writing it, remove it with megatron-wsd decay-now --cancel."
                raise ConfigError(where, "a whole json object", first["msg"], remedy) from None
            got = first.get("input")
            expected = "a known key" if first["type"] == "extra_forbidden" else words_of(first)
            error = ConfigError(where, expected, repr(got) if isinstance(got, str) else got)
            self._refuse(content, error)
            return None
        wrong = self._foreign(order)
        if wrong is not None:
            self._refuse(content, wrong)
            return None
        return order

    def _foreign(self, order: Order) -> ConfigError | None:
        """Why an order cannot be one of this run; None if it can."""
        own = self._run.id
        if order.run not in (None, own):
            return ConfigError(
                f"{self._pending}: run",
                f"{own}, the id of this run in run.json",
                order.run,
                "It was dropped for another run: ask that one.",
            )
        if order.data_mix is not None and self._run.config_json.is_file():
            mixes = sorted(load_config(self._run.config_json).data.mixes)
            if order.data_mix not in mixes:
                return ConfigError(
                    f"{self._pending}: data_mix", f"one of {mixes}, as in data.mixes", order.data_mix
                )
        for entry in self.accepted():
            if entry["number"] == order.number:
                remedy = "To repeat it, ask anew with megatron-wsd."
                return ConfigError(
                    str(self._pending), "a new order", f"that of step {entry['step']} again", remedy
                )
        return None

    def _refuse(self, content: bytes, error: ConfigError) -> None:
        """Put the file aside with the reason.

        Raises:
            ConfigError: ``error``; not if another island of this folder has dealt with the file meanwhile.
        """
        taken = self._pending.with_name(f".{self._pending.name}.{secrets.token_hex(6)}.tmp")
        try:
            self._pending.rename(taken)
            text = content.decode(errors="replace")
            write_json_atomic(self._refused, {"reason": str(error), "order": text})
            taken.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as e:  # a full or read-only disk is no reason for a run to end
            raise error from e
        raise error

    def propose(self, order: Order) -> None:
        """Drop an order for this run.

        Raises:
            ConfigError: another one waits already; orders are never stacked.
        """
        if self.pending() is not None:
            withdraw = f"megatron-wsd decay-now {self._run.path} --cancel"
            raise ConfigError(
                "--override" if order.kind == "override" else "decay-now",
                "no order that waits already",
                f"one in {self._pending}",
                f"It is taken in the next outer round; {withdraw} withdraws it.",
            )
        self._pending.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(
            self._pending, order.model_copy(update={"run": self._run.id}).model_dump(mode="json")
        )

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
        try:
            pending = self.pending()
        except ConfigError:
            pending = None
        # first removed, then noted: else an island that looks in between would take it for a repeated one
        if pending is not None and any(entry["number"] == pending.number for entry in orders):
            self.withdraw()
        write_json_atomic(self._accepted, orders)

    def accepted(self) -> list[dict[str, Any]]:
        """The orders that were committed, oldest first, each with ``step`` and, if refused, ``refused``."""
        try:
            return list(json.loads(self._accepted.read_text()))
        except (OSError, ValueError):
            return []
