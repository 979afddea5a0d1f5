"""``megatron-wsd plan``: memory, traffic, utilisation and schedule of a run before it is started."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_wsd.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_wsd.config import Config
    from megatron_wsd.planner import Plan, Question

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bps|bit/s|bits/s|bit|bits)")


def plan(
    config: Annotated[Path, typer.Argument(help="The json config.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Another model: 25m, 150m, 1b, 7b, 13b, 70b, 405b, 1t, or that of a config. Its shape, "
            "sequence length, vocabulary and recomputation; all else stays that of CONFIG."
        ),
    ] = None,
    islands: Annotated[int | None, typer.Option(help="Islands, whatever the config says.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of an island, whatever the config says.")] = None,
    wan: Annotated[str, typer.Option(help="Bandwidths of the link of one island.")] = "1gbps,10gbps,100gbps",
    rtt_ms: Annotated[float, typer.Option(help="Round trip between islands.")] = 30.0,
    step_time_s: Annotated[float | None, typer.Option(help="Measured seconds of an inner step.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device: v100, a10, l40s, a100, h100 (default), h200, b200, mi300x.")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="Peak TFLOP/s of one device.")] = None,
    mfu: Annotated[float, typer.Option(help="Share of that peak which is reached.")] = 0.4,
    flash: Annotated[bool, typer.Option("--flash", help="Attention keeps no scores in memory.")] = False,
    target_utilisation: Annotated[
        float, typer.Option(help="Share of the time that shall train; for the advice.")
    ] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw utilisation over bandwidth, a png.")] = None,
) -> None:
    """Tell what a run will need and how to choose its exchange; nothing is started.

    Example: megatron-wsd plan launch/configs/7b_2x8_10gbps.json --wan 1gbps,10gbps --gpu a100
    """
    from megatron_wsd.planner import Question, make_plan

    if plot is not None:
        check_picture(plot)
    loaded = config_for(config, model, islands, ranks)
    question = Question(
        bandwidths=bandwidths_of(wan),
        rtt_s=rtt_ms / 1e3,
        target=target_utilisation,
        step_s=step_time_s,
        gpu=gpu,
        tflops=tflops,
        mfu=mfu,
        flash=flash,
    )
    made = _with_data(make_plan(loaded, question), loaded)
    if model is not None:
        made = replace(made, assumed=[_told_model(model, loaded), *made.assumed])
    if plot is not None:
        _draw(loaded, question, f"{config.stem}: {_fleet(made)}", plot)
    if as_json:
        typer.echo(json.dumps(made.to_json(), indent=1))
        return
    for table in tables(made):
        _print(table)
    for title, lines in (("warning", made.warnings), ("assumed", made.assumed)):
        for line in lines:
            typer.echo(f"{title}: {line}")
    if plot is not None:
        typer.echo(f"wrote {plot}")


def bandwidths_of(text: str) -> tuple[float, ...]:
    """``"1gbps,250 Mbit/s"`` in bits a second, ascending.

    Raises:
        ConfigError: it cannot be read, or one of them is 0.
    """
    found = []
    for part in text.split(","):
        match = _BANDWIDTH.fullmatch(part.strip().lower())
        bits = float(match[1]) * _BITS[match[2]] if match else 0.0
        if bits <= 0:
            raise ConfigError(
                "--wan", "bandwidths with their unit and commas between them", text, "Write 1gbps,10gbps."
            )
        found.append(bits)
    return tuple(sorted(set(found)))


def config_for(path: Path, model: str | None, islands: int | None, ranks: int | None) -> Config:
    """The config with another model, or other numbers of islands and ranks than it names.

    Raises:
        ConfigError: the config or a flag cannot be used.
    """
    from megatron_wsd.config import BLOCK, load_config, parse_config, read_json

    raw = read_json(path, "CONFIG")
    block: Any = raw.get(BLOCK, {}) if isinstance(raw, dict) else None
    fixed: Any = block.get("islands", {}) if isinstance(block, dict) else None
    if (model is None and islands is None and ranks is None) or not isinstance(fixed, dict):
        return load_config(path, named="CONFIG")  # which tells what is wrong with it
    replaced = {"count": islands, "ranks": ranks}
    # what follows from the numbers that are replaced
    gone = {"min_islands"} if islands is not None else set()
    if ranks is not None and {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= raw.keys():
        raw.pop("train_batch_size", None)
    kept = {k: v for k, v in fixed.items() if k not in gone and replaced.get(k) is None}
    raw[BLOCK] = {**block, "islands": kept}
    if model is not None:
        own = block.get("model")
        layout = {k: v for k, v in own.items() if k == "tensor_parallel"} if isinstance(own, dict) else {}
        raw[BLOCK]["model"] = {**_model(model), **layout}
    return parse_config(raw, str(path), islands=islands, ranks=ranks)


def _model(name: str) -> dict[str, Any]:
    from megatron_wsd.config import load_config
    from megatron_wsd.planner import PRESETS, vocabulary

    if name.lower() in PRESETS:
        return PRESETS[name.lower()].model_dump(mode="json")
    if not name.endswith(".json") and not Path(name).is_file():
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Or give a config."
        raise ConfigError("--model", f"one of {', '.join(PRESETS)}, or a json config", name, hint)
    other = load_config(name, named="--model")
    if other.model is None:
        raise ConfigError("--model", "a config with a model", f"{name}, which has none")
    return {**other.model.model_dump(mode="json"), "vocab_size": vocabulary(other)}


def _told_model(name: str, config: Config) -> str:
    """The shape that ``--model`` stands for, and what it leaves as it is."""
    model = config.model
    assert model is not None
    heads, groups = model.num_attention_heads, model.num_query_groups
    return (
        f"the model is {name}: {model.num_layers} layers, hidden size {model.hidden_size:,}, ffn "
        f"{model.ffn_hidden_size:,}, {heads} heads in {groups} query groups, sequences of "
        f"{model.seq_length:,}, vocabulary {model.vocab_size:,}, {'' if model.recompute else 'no '}"
        f"recomputation; of the config are tensor_parallel ({model.tensor_parallel}), batch sizes, schedule, "
        "exchange and data"
    )


def _with_data(made: Plan, config: Config) -> Plan:
    """The plan with what becomes of the corpora, as far as they are here."""
    from megatron_wsd.config import BLOCK
    from megatron_wsd.data.epochs import passages
    from megatron_wsd.preflight import look_at_files

    files = look_at_files(config)
    data = passages(config, files.amounts, schedule=config.schedule)
    unknown = [e for e in files.problems if e.field.startswith(f"{BLOCK}.data.corpora.")]
    return replace(
        made,
        data=data,
        warnings=[*made.warnings, *(p.warning for p in data if p.warning)],
        assumed=[*made.assumed, *(f"nothing of the epochs of a corpus: {e}" for e in unknown)],
    )


def check_picture(out: Path) -> None:
    """That ``--plot`` names a picture that can be written.

    Raises:
        ConfigError: another ending, or a folder that is not there.
    """
    if out.suffix != ".png":
        remedy = f"Write {out.with_suffix('.png')}." if out.name else "Write plot.png, say."
        raise ConfigError("--plot", "a name that ends in .png", str(out), remedy)
    if not out.absolute().parent.is_dir():
        raise ConfigError("--plot", "a png in a folder that is there", str(out), "Make the folder first.")


def _draw(config: Config, question: Question, title: str, out: Path) -> None:
    from megatron_wsd.planner import make_plan
    from megatron_wsd.planner.picture import bandwidths, draw

    many = replace(question, bandwidths=bandwidths(question.bandwidths))
    draw(make_plan(config, many), question.bandwidths, title, out)


# ---- tables ----


def tables(made: Plan) -> list[Table]:
    """Everything of a plan as tables for people."""
    found = [_memory(made), _exchange(made), _links(made), _advice(made)]
    found += [_phases(made)] if made.phases else []
    return [*found, _data(made)] if made.data else found


def _print(table: Table) -> None:
    import shutil

    from rich.console import Console

    # at least as wide as the widest table: a pipe is no terminal, and would be taken for 80 columns
    Console(width=max(118, shutil.get_terminal_size().columns), highlight=False).print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _fleet(made: Plan) -> str:
    return f"{made.parameters:,} parameters, {made.islands} islands x {made.ranks} ranks"


def _memory(made: Plan) -> Table:
    table = _table(f"Memory of one rank: {_fleet(made)}", "part", "where", "when", "size", "how")
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for part in made.memory:
        table.add_row(part.name, part.where, part.moment, size(part.nbytes), part.how)
    table.add_section()
    for where, total in (("device", made.device_bytes), ("host", made.host_bytes)):
        table.add_row(f"[bold]most at once, {where}", where, "", f"[bold]{size(total)}", "")
    table.add_row(
        "both, where the device is the host", "", "", size(made.device_bytes + made.host_bytes), "a CPU run"
    )
    return table


def _exchange(made: Plan) -> Table:
    from megatron_wsd.planner.plan import gbit

    links = [f"at {gbit(link.bits_per_s)}" for link in made.links]
    columns = ("rank sends", "receives", "island sends", "receives", "largest piece", *links)
    table = _table("One sync of the whole model", "wire", *columns)
    for wire in made.exchange:
        mark = "[bold]" if wire.wire == made.wire else ""
        numbers = (wire.rank_sent, wire.rank_received, wire.island_sent, wire.island_received)
        cells = [size(n) for n in (*numbers, wire.largest_fragment_sent)]
        cells += [seconds(link.sync_s[wire.wire]) for link in made.links]
        table.add_row(f"{mark}{wire.wire}", *(f"{mark}{cell}" for cell in cells))
    return table


def _links(made: Plan) -> Table:
    from megatron_wsd.planner.plan import gbit

    cut = f", {made.fragments} fragments" if made.fragments > 1 else ""
    rounds = f"{made.wire}, {made.inner_steps} inner steps of {seconds(made.step_s)}{cut}"
    modes = ("data parallel", "synchronous", "streaming", "asynchronous", f"this run ({made.mode})")
    table = _table(f"Share of the time that trains: {rounds}", "link", *modes, "wall time")
    for link in made.links:
        shares = (link.data_parallel, link.sync, link.streaming, link.asynchronous, link.configured)
        wall = "no end" if link.wall_s is None else seconds(link.wall_s)
        table.add_row(gbit(link.bits_per_s), *(f"{share:.1%}" for share in shares), wall)
    return table


def _advice(made: Plan) -> Table:
    from megatron_wsd.planner.plan import gbit

    title = f"Advice for {made.target:.0%} of the time in training"
    columns = ("mode", "wire", "inner_steps", "fragments", "overlap_steps", "trains", "link busy", "why")
    table = _table(title, "link", *columns)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    for link in made.links:
        a = link.advice
        table.add_row(
            gbit(link.bits_per_s), a.mode, a.wire, str(a.inner_steps), str(a.fragments), str(a.overlap_steps),
            f"{a.utilisation:.1%}", f"{a.link_busy:.0%}", a.why,
        )  # fmt: skip
    return table


def _phases(made: Plan) -> Table:
    end = "no end" if made.tokens is None else f"{count(made.tokens)} tokens"
    title = f"Schedule: {count(made.tokens_per_step)} tokens a step over all islands, {end}"
    table = _table(title, "phase", "from step", "to step", "tokens", "rate at first", "at last")
    for phase in made.phases:
        rates = (f"{phase.rate_first:.3g}", f"{phase.rate_last:.3g}")
        last = "open" if phase.last is None else f"{phase.last:,}"
        tokens = "" if phase.tokens is None else count(phase.tokens)
        table.add_row(phase.name, f"{phase.first:,}", last, tokens, *rates)
    return table


def _data(made: Plan) -> Table:
    end = made.data[0].end
    table = _table("Data" if end is None else f"Data to step {end:,}", "corpus", "tokens to train on", "use")
    for passage in made.data:
        most = "" if passage.exact else "at most "
        table.add_row(passage.corpus, f"{most}{count(passage.tokens)}", str(passage))
    return table


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}" if nbytes < 100 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f} B"


def count(number: float) -> str:
    """A count for people."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"


def seconds(s: float) -> str:
    """A time for people."""
    for unit, name in ((2 * 86400, "days"), (2 * 3600, "h"), (300, "min")):
        if s >= unit:
            return f"{s / {'days': 86400, 'h': 3600, 'min': 60}[name]:.1f} {name}"
    return f"{s:.3g} s"
