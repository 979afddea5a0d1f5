"""The command ``megatron-wsd``: one module a subcommand, and nothing slow imported before it is needed."""

from __future__ import annotations

import errno
import functools
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import megatron_wsd
from megatron_wsd.cli.branch import branch, lineage
from megatron_wsd.cli.decay_now import decay_now
from megatron_wsd.cli.doctor import doctor
from megatron_wsd.cli.island import island
from megatron_wsd.cli.launch import launch
from megatron_wsd.cli.plan import plan
from megatron_wsd.cli.prepare_data import prepare_data
from megatron_wsd.cli.report import report
from megatron_wsd.cli.resize import resize
from megatron_wsd.cli.schedule import schedule
from megatron_wsd.cli.status import status
from megatron_wsd.cli.usage import Command, Group, epilog
from megatron_wsd.errors import MegatronWSDError, Refused

_READER_GONE = 128 + signal.SIGPIPE


def _one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """What a user can mend is told in one line, without a traceback unless MEGATRON_WSD_DEBUG is set."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except SystemExit:  # rich ends the process where the reader of a pipe has gone
            raise typer.Exit(_READER_GONE) from None
        except BrokenPipeError:
            # as `head` does; nothing is left to tell, also not when Python empties its buffers at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_READER_GONE) from None
        except (MegatronWSDError, OSError) as e:
            if os.environ.get("MEGATRON_WSD_DEBUG"):
                raise
            texts = [str(problem) for problem in (e.problems if isinstance(e, Refused) else [e])]
            if isinstance(e, OSError):
                texts = [f"{e.filename or 'system'}: {e.strerror or e}"]
                if e.errno == errno.ENOSPC:
                    texts[0] += ". Free some space, or name another folder."
            for text in texts:
                typer.echo(f"megatron-wsd: error: {text}", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "matplotlib":
                raise
            text = "expected matplotlib for pictures, got none. pip install 'megatron_wsd[report]'."
            typer.echo(f"megatron-wsd: error: {text}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"megatron-wsd {megatron_wsd.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="megatron-wsd",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pre-train across islands with DeepSpeed ZeRO-3: WSD schedules, DiLoCo rounds, CGAD."""


for _command in (
    plan,
    launch,
    island,
    resize,
    status,
    decay_now,
    branch,
    lineage,
    schedule,
    prepare_data,
    report,
    doctor,
):
    _name = _command.__name__.replace("_", "-")
    app.command(_name, cls=Command, epilog=epilog(_name))(_one_line_errors(_command))


def main() -> None:
    """Entry point of ``megatron-wsd`` and ``python -m megatron_wsd``."""
    for stream in (sys.stdout, sys.stderr):
        # a locale or a file name may hold what UTF-8 does not: told with escapes, not with a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
