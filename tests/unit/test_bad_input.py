"""Whatever is wrong in a config or an option is told at once, in one line: field, expected, got, way out."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import ROOT, SIZE, TINY, nothing_starts, refused, run
from shipped_data import lay_data
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.config import load_config, parse_config
from megatron_wsd.errors import ConfigError, FieldError
from megatron_wsd.preflight import check_trainer

__all__ = ["nothing_starts"]


def changed(path: str, value: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(TINY.read_text())
    node = raw
    *parents, last = path.split("/")
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return raw


def starts(folder: Path, config: Path) -> Iterator[tuple[object, ...]]:
    """Every command that would start the run, or would only say so."""
    flags = (*SIZE, "--config", config, "--run-dir", folder / "run")
    island = ("island", "--island", 0, "--lighthouse", "http://127.0.0.1:9", *flags)
    yield ("launch", *flags)
    yield ("launch", *flags, "--dry-run")
    yield island
    yield (*island, "--dry-run")


# ---- configs ----

# path in the json, value, what is told
WRONG: list[tuple[str, Any, str]] = [
    ("optimizer/type", "AdamX", "optimizer.type: expected Adam, AdamW, .*got 'AdamX'. Did you mean 'Adam'"),
    ("optimizer/type", "sgd", "optimizer.type: .*Did you mean 'SGD'"),
    ("optimizer/type", "SGD", 'optimizer.type: .*"zero_allow_untested_optimizer": true'),
    ("optimizer/type", 3, "optimizer.type: expected a text, got 3"),
    ("optimizer/param", {}, "optimizer.param: .*Did you mean 'params'"),
    ("optimizer/params/beta", [0.9, 0.95], "optimizer.params.beta: .*Did you mean 'betas'"),
    ("optimizer/params/bias_correction", True, "optimizer.params.bias_correction: expected a known key"),
    ("optimizer/params/betas", [0.9], r"optimizer.params.betas: expected two numbers in \[0, 1\)"),
    ("optimizer/params/torch_adam", "yes", "optimizer.params.torch_adam: expected true or false"),
    ("scheduler/type", "WSDD", "scheduler.type: expected \"WSD\", .*got 'WSDD'. Did you mean 'WSD'"),
    ("scheduler/type", "wsd", "scheduler.type: .*Did you mean 'WSD'"),
    ("scheduler/parms", {}, "scheduler.parms: .*Did you mean 'params'"),
    ("zero_optimization/overlap_com", True, "zero_optimization.overlap_com: .*Did you mean 'overlap_comm'"),
    ("zero_optimization/max_live", 1, "zero_optimization.max_live: expected a known key"),
    ("zero_optimization/reduce_bucket_size", "x", "zero_optimization.reduce_bucket_size: expected a whole"),
    ("zero_optimization/reduce_bucket_size", "auto", "reduce_bucket_size: .*Hugging Face"),
    ("zero_optimization/overlap_comm", "true", "zero_optimization.overlap_comm: expected true or false"),
    ("zero_optimization/stage", True, "zero_optimization.stage: expected "),
    ("zero_optimization/cpu_offload", True, "cpu_offload: .*offload_optimizer"),
    ("zero_optimization/mics_shard_size", -1, "mics_shard_size: .*MiCS"),
    ("zero_optimization/offload_optimizer", {"devise": "cpu"}, "offload_optimizer.devise: .*'device'"),
    ("zero_optimization/offload_optimizer", {"device": "gpu"}, 'offload_optimizer.device: .*"cpu"'),
    ("gradient_acumulation_steps", 2, "gradient_acumulation_steps: .*'gradient_accumulation_steps'"),
    ("prescale_gradient", True, "prescale_gradient: .*Did you mean 'prescale_gradients'"),
    ("clip_grad", 1.0, "clip_grad: expected a known key, .*begin its name with _"),
    ("nebula", {}, "nebula: expected no such key, .*no more"),
    ("fp16", {"enabled": True}, "fp16.enabled: expected bf16 or fp32, .*loss scales"),
    ("bf16", {"enable": True}, "bf16.enable: .*Did you mean 'enabled'"),
    ("bf16", {"bf16_master_weights_and_grads": True}, "bf16_master_weights_and_grads: .*fp32 masters"),
    ("bfloat16", {"enabled": True}, "bfloat16.enabled: .*Write bf16"),
    ("tensorboard", {"enabled": "yes"}, "tensorboard.enabled: expected true or false, got 'yes'"),
    ("tensorboard", None, "tensorboard: expected a json object, got None"),
    ("train_micro_batch_size_per_gpu", "auto", "train_micro_batch_size_per_gpu: .*Hugging Face"),
    ("megatron_wsd", "yes", "megatron_wsd: expected a json object, got 'yes'"),
    ("megatron_wsd/sync", None, "megatron_wsd.sync: expected a json object, got None"),
    ("megatron_wsd/outer/betas", [0.9], "megatron_wsd.outer.betas.1: expected a value"),
    ("megatron_wsd/sync/timeout_s", 1e300, "megatron_wsd.sync.timeout_s: expected at most"),
    ("megatron_wsd/model/num_layers", 2**62, "megatron_wsd.model.num_layers: expected at most"),
    ("megatron_wsd/model/num_layers", 10**400, "megatron_wsd.model.num_layers: expected a number of less"),
    ("megatron_wsd/data/corpora/broad", "builtin:stdlb", "data.corpora.broad: .*'builtin:stdlib'"),
    ("megatron_wsd/data/corpora/broad", "txt:/x", "data.corpora.broad: .*Did you mean 'text:/x'"),
    ("megatron_wsd/data/corpora/broad", "s3://x", "data.corpora.broad: .*on this disk"),
    ("megatron_wsd/data/corpora/broad", "", "megatron_wsd.data.corpora.broad: expected "),
    ("megatron_wsd/data/corpora/broad", "\ud800", "megatron_wsd.data.corpora.broad: expected a text"),
    ("megatron_wsd/data/corpora", {}, "megatron_wsd.data.corpora: expected at least one corpus"),
    ("megatron_wsd/data/tokenizer", "bytes", "megatron_wsd.data.tokenizer: .*Did you mean 'byte'"),
    ("megatron_wsd/data/cache_dir", "a\0b", "megatron_wsd.data.cache_dir: .*null bytes"),
    ("megatron_wsd/data/mixes/decay", {"broad": 1e300}, "data.mixes.decay.broad: expected a weight from"),
    ("ключ", 1, "ключ: expected a known key, got the unknown key 'ключ'"),
]


@pytest.mark.parametrize(("path", "value", "told"), WRONG, ids=lambda v: str(v)[:40])
def test_a_wrong_config_starts_nothing(path: str, value: Any, told: str, tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(changed(path, value)))
    for command in (*starts(tmp_path, config), ("plan", config, *SIZE), ("schedule", config, *SIZE)):
        line = refused(*command)
        assert re.match(rf"[\w.]*{told}", line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (
            "corpora/broad",
            "/nope",
            "megatron_wsd.data.corpora.broad: expected a file, got /nope.idx: nothing",
        ),
        ("corpora/broad", "text:/nope.txt", "megatron_wsd.data.corpora.broad: expected a file, or a folder"),
        ("corpora/broad", "a" * 5000, "megatron_wsd.data.corpora.broad: expected a path that can be read"),
        (
            "tokenizer",
            "hf:/nope",
            "megatron_wsd.data.tokenizer: expected a folder with the files of a Hugging",
        ),
    ],
    ids=lambda v: str(v)[:20],
)
def test_files_that_are_not_there(
    path: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_wsd.preflight.importlib.util.find_spec", lambda name: name)  # transformers
    config = tmp_path / "c.json"
    config.write_text(json.dumps(changed(f"megatron_wsd/data/{path}", value)))
    for command in starts(tmp_path, config):
        assert refused(*command).startswith(told)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (
            "optimizer/params",
            {},
            "optimizer.params.lr: expected the peak of the schedule, above 0, got nothing",
        ),
        ("optimizer/params/lr", 0, "optimizer.params.lr: expected the peak of the schedule, above 0, got 0"),
        ("scheduler/params/max_lr", [0.0], "scheduler.params.max_lr: expected the peak"),
        ("scheduler/type", "OneCycle", 'scheduler.type: expected "WSD", got OneCycle'),
        ("megatron_wsd/model/vocab_size", 100, "megatron_wsd.model.vocab_size: expected at least 257"),
        ("megatron_wsd/model", None, "megatron_wsd.model: expected the shape of a GPTModel"),
    ],
)
def test_what_the_trainer_needs(path: str, value: Any, told: str, tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(changed(path, value)))
    for command in starts(tmp_path, config):
        assert refused(*command).startswith(told)


def test_too_many_islands(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(changed("megatron_wsd/islands", {"count": 10**9})))
    told = "megatron_wsd.islands.count: expected at most 4096, got 1000000000."
    assert refused("plan", config) == refused("schedule", config) == told


def test_the_package_of_a_tokenizer_counts_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lay_data(tmp_path)
    monkeypatch.setattr("megatron_wsd.preflight.importlib.util.find_spec", lambda name: None)
    config = tmp_path / "c.json"
    config.write_text(json.dumps(changed("megatron_wsd/data/tokenizer", "hf:data/tokenizer")))
    wet, dry, *_ = starts(tmp_path, config)
    assert "expected the package transformers" in refused(*wet)
    assert run(*dry)[0] == 0


LEAVES = ["x", "", None, True, -1, 0, 1.5, 10**400, 1e308, float("nan"), float("-inf"), [], {}, [1], {"a": 1}]


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from paths(item, (*path, key))


def test_whatever_stands_in_a_config_is_taken_or_told() -> None:
    """Every section and leaf of a complete config, replaced by what does not belong there, or added to."""
    whole = parse_config(json.loads(TINY.read_text()), islands=2, ranks=2).resolved()
    whole["bf16"] = {"enabled": False}
    whole["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    whole["megatron_wsd"]["sync"]["controlled_delay"] = {"kind": "uniform", "low": 0, "high": 2}
    whole["megatron_wsd"]["outer"]["lr_schedule"] = {"warmup_steps": 2}
    told = taken = 0
    for path in paths(whole):
        for value in (*LEAVES, "unknown key"):
            raw = copy.deepcopy(whole)
            node: Any = raw
            for key in path[:-1]:
                node = node[key]
            place = node[path[-1]] if path else raw
            if value == "unknown key":
                if not isinstance(place, dict):
                    continue
                place["no_süch_key"] = 1
            elif path:
                node[path[-1]] = value
            else:
                raw = value
            try:
                check_trainer(parse_config(raw, "c.json", islands=2, ranks=2))
            except FieldError as e:
                told += 1
                assert e.field and e.expected, (path, value)
                assert len(str(e)) < 900 and ".. " not in str(e), str(e)
                if path and path[-1] not in ("train_batch_size", "islands", "model", "optimizer"):
                    assert str(path[0]) in str(e), (path, value, str(e))
                continue
            taken += 1
            assert value != "unknown key" or path[-1:] in (("corpora",), ("outer",)), path
    assert told > 1000 and taken > 50


# ---- files that are no json ----


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "expected a json file, got FILE, an empty file"),
        (b" \n", "expected a json file, got FILE, an empty file"),
        (b"\x7fELF\xd0\x00", "expected a json file, got FILE, a file that is no text"),
        (b"hello", "expected valid json, got FILE, expecting value in line 1, column 1"),
        (b"{", "expected valid json, got FILE, the end of the file too early"),
        (b'{\n "a": 1,\n}', "expected valid json, got FILE, a comma before '}' in line 2, column 8"),
        (b'{"a": [1, 2,]}', "expected valid json, got FILE, a comma before ']' in line 1, column 12"),
        (
            b'{\n  // note\n "a": 1}',
            "expected valid json, got FILE, a comment, which json has not, in line 2",
        ),
        (b"{'a': 1}", "expected valid json, got FILE, expecting property name enclosed in double quotes in"),
        (
            b'{"a": 1,\n"b": {"a": 2, "a": 3}}',
            "expected each key once, got FILE, 'a' twice in one object, lines 1, 2",
        ),
        (b"[" * 100_000, "expected valid json, got FILE, "),
        (b'{"a": ' + b"1" * 5000 + b"}", "expected valid json, got FILE, "),
    ],
    ids=range(12),
)
def test_a_file_that_is_no_json(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(content)
    for command in starts(tmp_path, file):
        assert refused(*command).startswith(f"--config: {told.replace('FILE', str(file))}")
    assert refused("plan", file, *SIZE).startswith(f"CONFIG: {told.replace('FILE', str(file))}")
    assert refused("schedule", file).startswith(f"CONFIG|RUN: {told.replace('FILE', str(file))}")


def test_what_is_no_file(tmp_path: Path) -> None:
    missing, folder = tmp_path / "no", tmp_path / "run"
    folder.mkdir()
    for command in starts(tmp_path, missing):
        assert (
            refused(*command)
            == f"--config: expected a json file, got {missing}, which does not exist. Check the path."
        )
    for command in starts(tmp_path, folder):
        assert refused(*command).startswith(f"--config: expected a json file, got {folder}, a folder.")
    (folder / "config.json").write_text("{}")
    assert refused("plan", folder).endswith(f"That of this run is {folder / 'config.json'}.")
    told = refused("schedule", missing)
    assert told.startswith(
        f"CONFIG|RUN: expected a json config or a run folder, got {missing}, which does not"
    )
    assert "a folder without a run" in refused("schedule", folder)
    with pytest.raises(ConfigError, match=f"^{missing}: expected a json file, got nothing there"):
        load_config(missing)


def test_a_byte_order_mark_is_no_reason(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(b"\xef\xbb\xbf" + TINY.read_bytes())
    assert load_config(file).digest() == load_config(TINY).digest()


# ---- options ----


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("launch", "--steps", "4o"), "--steps: expected a whole number, got '4o'."),
        (("launch", "--steps", "1.5"), "--steps: expected a whole number, got '1.5'."),
        (("launch", "--steps", ""), "--steps: expected a whole number, got ''."),
        (("launch", "--config"), "--config: expected a value, got nothing. "),
        (("launch", "--config", "x"), "--run-dir: expected a value, got nothing. megatron-wsd launch --help"),
        (
            ("launch", "--conifg", "x"),
            "--conifg: expected an option of megatron-wsd launch, got an unknown one. Did",
        ),
        (("plan",), "CONFIG: expected a value, got nothing."),
        (("plan", TINY, "x"), "Got unexpected extra argument"),
        (("plan", TINY, "--mfu", "abc"), "--mfu: expected a number, got 'abc'."),
        (("plan", TINY, "--islands", 10**30), "--islands: expected at most 4,096, got 1"),
        (("plan", TINY, "--tflops", 1e308), "--tflops: expected a number above 0, at most 1e9, got 1e+308."),
        (
            ("plan", TINY, "--plot", "x.docx"),
            "--plot: expected a name that ends in .png, got x.docx. Write x.png.",
        ),
        (("plan", TINY, "--plot", ""), "--plot: expected a name that ends in .png"),
        (("plan", TINY, "--plot", "/no/x.png"), "--plot: expected a png in a folder that is there"),
        (("schedule", TINY, "--plot", "x.pdf"), "--plot: expected a name that ends in .png, got x.pdf."),
        (("schedule", TINY, "--steps", 0), "--steps: expected at least 1, got '0'."),
        (("schedule", TINY, "--at", 10**30), "--at: expected whole numbers with commas between them"),
        (
            ("decay-now", "R", "--then", "stabel"),
            "--then: expected one of stop, stable, got 'stabel'. Did you mean",
        ),
        (("decay-now", "R", "--wait", "-3"), "--wait: expected at least 0, got '-3'."),
        (("status", "R", "--interval", "nan"), "--interval: expected at least 0.2, got 'nan'."),
        (("lineage", "R", "--x"), "--x: expected an option of megatron-wsd lineage, got an unknown one. "),
        (
            ("prepare-data", "--out", "o", "--tokenizer", "bytes"),
            "--tokenizer: expected 'byte' or 'hf:PATH', got 'bytes'",
        ),
        (("prepare-data", "--out", "o", "--tokenizer", "hf:/nope"), "--tokenizer: expected a folder"),
        (("prepare-data", "--out", "o", "--text", "/nope"), "--text: expected a file, or a folder with"),
        (
            ("launch", "--config", TINY, "--run-dir", "R", "--override", "x"),
            "--override: expected schedule.FIELD",
        ),
        (
            ("launch", "--config", TINY, "--run-dir", "R", "--override", "schedule.max_lr=1", "--dry-run"),
            "--override: expected --resume with it, got a new run. ",
        ),
    ],
    ids=lambda v: " ".join(map(str, v))[-40:] if isinstance(v, tuple) else "",
)
def test_a_wrong_option_is_named(
    words: tuple[object, ...], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(*words).startswith(told)
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_arguments_still_shows_its_help() -> None:
    done = CliRunner().invoke(app, [])
    assert "Usage: " in done.output and "error" not in done.output


# ---- what is assumed ----


def test_numbers_that_nobody_said_are_told() -> None:
    # with the tables on stdout, see test_cli_schedule
    assert run("schedule", TINY, "--csv")[1] == (
        "assumed: 1 island and 1 rank an island, so 4 samples a step; to say otherwise: --islands, --ranks\n"
    )
    assert run("schedule", TINY, "--csv", *SIZE)[1] == ""
    assert run("schedule", ROOT / "launch" / "configs" / "1b.json", "--csv")[1] == ""
    plans = {size: CliRunner().invoke(app, ["plan", str(TINY), *size]).output for size in ((), SIZE)}
    assert "assumed: 1 island and 1 rank an island, so 4 samples" in plans[()]
    assert (
        "1 rank an island" not in plans[SIZE] and "no device is named, so an H100 is assumed" in plans[SIZE]
    )
    measured = CliRunner().invoke(app, ["plan", str(TINY), *SIZE, "--step-time-s", "0.2"]).output
    assert "H100" not in measured


# ---- readers that go away ----


@pytest.mark.parametrize(
    "words",
    [("plan", TINY, *SIZE), ("plan", TINY, *SIZE, "--json"), ("schedule", TINY, *SIZE, "--csv"), ("dry",)],
    ids=["plan", "json", "csv", "dry-run"],
)
def test_a_pipe_without_a_reader_ends_a_command_quietly(words: tuple[object, ...], tmp_path: Path) -> None:
    if words == ("dry",):
        words = ("launch", *SIZE, "--config", TINY, "--run-dir", tmp_path / "run", "--dry-run")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_wsd", *map(str, words)],
        cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_errors_read_as_one_sentence() -> None:
    inner = FieldError("a", "b", "c", "Do d.")
    assert str(FieldError("x", "y", str(inner))) == "x: expected y, got a: expected b, got c. Do d."
    assert str(inner.under("--a")) == "--a: expected b, got c. Do d."
    assert len(str(FieldError("x", "y", "z" * 5000))) < 700
    assert len(str(FieldError("x", "y", {str(i): "z" * 500 for i in range(50)}))) < 900
