"""How a subcommand explains itself: an example in its help, and what was meant by a wrong option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

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
        return f"there are {', '.join(_options(self))}"


def _options(command: Any) -> list[str]:
    return [option for param in command.params for option in param.opts if option.startswith("--")]
