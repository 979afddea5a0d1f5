"""How a subcommand explains itself: an example in its help, and what was meant by a wrong option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from megatron_wsd.errors import FieldError

# Below the help of each subcommand; those that are not here have theirs in their docstring.
EXAMPLES: Mapping[str, str] = {
    "launch": "megatron-wsd launch --config launch/configs/tiny_cpu.json --islands 2 --ranks 2 "
    "--run-dir runs/first",
    "island": "megatron-wsd island --island 0 --islands 2 --ranks 8 --lighthouse http://10.8.0.1:29510 "
    "--config launch/configs/7b_2x8_10gbps.json --run-dir runs/7b --interface wg0 --dry-run",
    "resize": "megatron-wsd resize runs/7b --islands 3",
    "decay-now": "megatron-wsd decay-now runs/7b --steps 47000 --data-mix decay --wait 600",
    "branch": "megatron-wsd branch runs/7b@400000 --name code --decay-steps 20000 --data-mix code",
    "lineage": "megatron-wsd lineage runs/7b",
    "schedule": "megatron-wsd schedule launch/configs/tiny_cpu.json --islands 2 --at 0,10,95",
    "prepare-data": "megatron-wsd prepare-data --out data --text web=crawl/ --text books.jsonl "
    "--tokenizer hf:tokenizer",
    "doctor": "megatron-wsd doctor",
}


def epilog(name: str) -> str | None:
    """What stands below the help of a subcommand."""
    return f"Example: {EXAMPLES[name]}" if name in EXAMPLES else None


class Command(TyperCommand):
    """A subcommand that says which option was meant, also where it is one of another subcommand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's, which names options that are spelt alike; where none is, the message is completed."""
        try:
            return super().parse_args(ctx, args)
        except Exception as e:
            # NoSuchOption is click's or, in newer versions of typer, one of its own; only it has both
            wrong, near = getattr(e, "option_name", None), getattr(e, "possibilities", None)
            if wrong is not None and hasattr(e, "possibilities") and not near:
                e.message += f" ({self._instead(ctx, wrong)})"  # type: ignore[attr-defined]
            raise

    def _instead(self, ctx: Any, wrong: str) -> str:
        others = ctx.parent.command.commands if ctx.parent is not None else {}
        having = [name for name, other in others.items() if wrong in _options(other)]
        if having:
            return f"it is one of megatron-wsd {', '.join(having)}"
        own = _options(self)
        return f"there are {', '.join(own)}" if own else "there is none"


class Group(TyperGroup):
    """The command itself, which tells of a wrong option as of everything else that is wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's."""
        with _in_one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """As typer's."""
        with _in_one_line():
            return super().invoke(ctx)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        # click's usage errors have several homes, as above; that without a word of its own is the help
        if (
            getattr(e, "exit_code", None) != 2
            or not hasattr(e, "ctx")
            or type(e).__name__ == "NoArgsIsHelpError"
        ):
            raise
        typer.echo(f"megatron-wsd: error: {_sentence(e)}", err=True)
        raise typer.Exit(2) from None


def _sentence(e: Any) -> str:
    """What is wrong with an option or argument: its name, what was expected, what came."""
    path = e.ctx.command_path if e.ctx is not None else "megatron-wsd"
    help_ = f"{path} --help tells what it takes."
    option, param = getattr(e, "option_name", None), getattr(e, "param", None)
    if param is not None:
        argument = param.param_type_name == "argument"
        name = (param.metavar or param.name.upper()) if argument else max(param.opts, key=len)
        if type(e).__name__ == "MissingParameter":
            return f"{name}: expected a value, got nothing. {help_}"
        return str(FieldError(name, *_expected(e, param)))
    if option is not None and hasattr(e, "possibilities"):
        near = " or ".join(sorted(e.possibilities or ()))
        detail = e.message.partition(" (")[2].rstrip(")")
        remedy = (
            f"Did you mean {near}?" if near else f"{detail[:1].upper()}{detail[1:]}." if detail else help_
        )
        return str(FieldError(option, f"an option of {path}", "an unknown one", remedy))
    if option is not None:  # BadOptionUsage: an option without its value
        return f"{option}: expected a value, got nothing. {help_}"
    text = str(e.format_message()).rstrip(".")
    return f"{text}{'' if text.endswith('?') else '.'}"


def _expected(e: Any, param: Any) -> tuple[str, str, str]:
    """Of a value that cannot be read: what was expected, what came, what was meant."""
    cause = e.__cause__  # pydantic's, with newer versions of typer
    found = cause.errors()[0] if hasattr(cause, "errors") else {}
    quoted = re.findall(r"'([^']*)'", e.message) or ["another value"]
    got = repr(str(found.get("input", quoted[0])))
    kinds = (getattr(param, "type_descriptor", None), getattr(param, "type", None))
    choices = next((c for c in (getattr(kind, "choices", None) for kind in kinds) if c), ())
    if choices:
        names = [str(getattr(choice, "value", choice)) for choice in choices]
        near = difflib.get_close_matches(got, names, n=1)
        return f"one of {', '.join(names)}", got, f"Did you mean {near[0]!r}?" if near else ""
    if "ge" in found.get("ctx", {}):
        return f"at least {found['ctx']['ge']:g}", got, ""
    told = found.get("type", "") + re.sub("'.*?'", "", e.message)
    return "a number" if "float" in told else "a whole number" if "int" in told else "another value", got, ""


def _options(command: Any) -> list[str]:
    return [option for param in command.params for option in param.opts if option.startswith("--")]
