"""What a start would refuse, a dry run refuses in the same words, and touches nothing."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusals import SIZE, TINY, nothing_starts, refused, run
from run_folders import checkpoint
from typer.testing import CliRunner

from megatron_wsd.addresses import is_here, is_loopback
from megatron_wsd.cli import app
from megatron_wsd.cli import checks as checks_module
from megatron_wsd.cli import command as command_module
from megatron_wsd.config import load_config
from megatron_wsd.control import Order
from megatron_wsd.lineage import make_branch
from megatron_wsd.rundir import RunDir, held, open_run

__all__ = ["nothing_starts"]

Words = tuple[object, ...]


def config_in(folder: Path, **parts: Any) -> Path:
    """The tiny config with other parts of its block; ``params`` are the scheduler's."""
    raw = json.loads(TINY.read_text())
    raw["scheduler"]["params"] = parts.pop("params", raw["scheduler"]["params"])
    for part, keys in parts.items():
        raw["megatron_wsd"][part] = {**raw["megatron_wsd"].get(part, {}), **keys}
    (file := folder / "given.json").write_text(json.dumps(raw))
    return file


def launch(folder: Path, config: Path = TINY, *more: object) -> Words:
    return ("launch", *SIZE, "--config", config, "--run-dir", folder / "run", *more)


def island(folder: Path, config: Path = TINY, *more: object) -> Words:
    flags = ("--island", 0, *SIZE, "--lighthouse", "http://127.0.0.1:29510")
    return ("island", *flags, "--config", config, "--run-dir", folder / "run", *more)


def both(*words: object) -> str:
    """Start and dry run are refused alike, and leave every file as it is; the line."""
    folder = Path(str(words[words.index("--run-dir") + 1])).parent
    before = snapshot(folder)
    wet, dry = refused(*words), refused(*words, "--dry-run")
    assert wet == dry and snapshot(folder) == before
    return dry


def snapshot(folder: Path) -> dict[Path, tuple[float, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def told(*words: object) -> str:
    """What a command that is not refused prints."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


# ---- data ----


def pair(prefix: Path, tokens: int) -> str:
    """A .bin and .idx of one sequence of uint16."""
    index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\x00\x00", 1, 8, 1, 2, tokens, 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"\0" * (2 * tokens))
    return str(prefix)


def corpora(folder: Path, high_quality: str) -> Path:
    return config_in(folder, data={"corpora": {"broad": "builtin:stdlib", "high_quality": high_quality}})


@pytest.mark.parametrize("command", [launch, island])
def test_a_corpus_shorter_than_a_sample(tmp_path: Path, command: Any) -> None:
    (text := tmp_path / "short.txt").write_text("x" * 100)
    for spec, count in ((pair(tmp_path / "c", 257), 257), (f"text:{text}", 101)):
        line = both(*command(tmp_path, corpora(tmp_path, spec)))
        assert line == (
            "megatron_wsd.data.corpora.high_quality: expected at least 258 tokens, one sample to train and "
            f"one to validate, got {count} tokens. Use more text or a shorter seq_length."
        )
    assert run(*command(tmp_path, corpora(tmp_path, pair(tmp_path / "c", 258)), "--dry-run"))[0] == 0


@pytest.mark.parametrize("command", [launch, island])
def test_everything_that_is_missing_is_named(tmp_path: Path, command: Any) -> None:
    names = {"broad": "/no/a", "high_quality": "text:/no/b", "third": "/no/c.bin"}
    config = config_in(tmp_path, data={"corpora": names, "tokenizer": "hf:/no/tokenizer"})
    for more in ((), ("--dry-run",)):
        code, lines = run(*command(tmp_path, config, *more))
        assert code == 2 and not (tmp_path / "run").exists()
        assert lines.count("megatron-wsd: error: ") == lines.count("\n")
        for what in (*(f"data.corpora.{name}: " for name in names), "data.tokenizer: expected a folder"):
            assert lines.count(f"error: megatron_wsd.{what}") == 1, lines
        assert "/no/a.idx: nothing there, nor at /no/a.bin" in lines


def test_a_corpus_that_was_prepared_with_another_tokenizer(tmp_path: Path) -> None:
    (folder := tmp_path / "tokenizer").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    assert run("prepare-data", "--out", tmp_path / "data", "--text", f"t={__file__}")[0] == 0
    corpus = {"broad": str(tmp_path / "data" / "t")}
    config = config_in(
        tmp_path, data={"corpora": corpus, "mixes": {"stable": {"broad": 1}}, "tokenizer": f"hf:{folder}"}
    )
    code, lines = run(*launch(tmp_path, config, "--dry-run"))
    assert code == 2 and "corpora.broad: expected tokens of data.tokenizer, 'hf:" in lines


def test_repeated_data_is_warned_of_by_both(tmp_path: Path) -> None:
    config = corpora(tmp_path, pair(tmp_path / "c", 128 * 40 + 2))
    for more, mark in ((("--dry-run",), "#"), ((), "[launch]")):
        text = told(*launch(tmp_path, config, *more))
        # 60 steps of 16 samples at 0.7, of 38: the mix is kept to 1/1024
        assert f"{mark} warning: corpus high_quality: 17.7 epochs to step 320, of 4,864 tokens." in text
        assert f"{mark} data to step 320: broad 0.0" in text
    until = told(*launch(tmp_path / "other", config, "--dry-run", "--steps", 100))
    assert "data to step 100: broad" in until and "epochs to step" not in until
    config = config_in(tmp_path, params={"warmup_steps": 5})
    assert "# no end: broad through once after step " in told(
        *island(tmp_path / "other", config, "--dry-run")
    )


def test_files_of_other_kinds_are_counted_by_both(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    (text / "a.txt").write_text("some text\n" * 100)
    for i in range(3):
        (text / f"{i}.html").write_text("<p>")
    line = "corpus high_quality: 1 of 4 files are read (*.jsonl, *.md, *.py, *.txt); skipped: 3 .html"
    config = corpora(tmp_path, f"text:{text}")
    assert f"# {line}\n" in told(*launch(tmp_path, config, "--dry-run"))
    assert f"[launch] {line}\n" in told(*launch(tmp_path, config))


# ---- the run folder ----


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """A run of two islands of two ranks that has begun, and has saved nothing."""
    run = open_run(tmp_path / "run", load_config(TINY, islands=2, ranks=2), resume=False)
    for i in range(2):
        run.island(i).mkdir()
        run.metrics(i).touch()
    return run


def test_folders_that_do_not_fit(tmp_path: Path, begun: RunDir) -> None:
    line = both(*launch(tmp_path))
    assert line.startswith(f"--run-dir: expected a new or empty folder, got {begun.path}, which holds a run")
    assert both(*island(tmp_path)).startswith("--run-dir: expected a folder in which island 0 has not begun")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    line = both(*launch(nowhere, TINY, "--resume"))
    assert f"--resume: expected a run to go on with, got {nowhere / 'run'}, which does not exist." in line
    (nowhere / "run").mkdir()
    (nowhere / "run" / "notes.txt").touch()
    for command in (launch, island):
        assert "which holds other files and no run.json" in both(*command(nowhere))


@pytest.mark.parametrize("command", [launch, island])
def test_a_config_that_was_changed(tmp_path: Path, begun: RunDir, command: Any) -> None:
    changed = config_in(tmp_path, sync={"inner_steps": 20}, outer={"lr": 1e-3})
    for more in ((), ("--dry-run",)):
        code, text = run(*command(tmp_path, changed, "--resume", *more))
        assert code == 2 and "megatron_wsd.outer.lr: saved 0.003, given 0.001" in text
        assert "megatron_wsd.sync.inner_steps: saved 10, given 20" in text


@pytest.mark.parametrize("command", [launch, island])
def test_an_island_that_is_running(tmp_path: Path, begun: RunDir, command: Any) -> None:
    with held(begun.island(0) / "lock", "island 0"):
        line = both(*command(tmp_path, TINY, "--resume"))
    assert line.startswith("island 0: expected no other process at it, got process ")
    assert told(*command(tmp_path, TINY, "--resume", "--dry-run"))


def test_a_launch_that_is_running(tmp_path: Path, begun: RunDir) -> None:
    with held(begun.path / "launch.lock", "launch"):
        assert both(*launch(tmp_path, TINY, "--resume")).startswith("launch: expected no other process at it")


@pytest.fixture
def branched(tmp_path: Path, begun: RunDir) -> tuple[RunDir, RunDir]:
    """A run and a branch of it, at step 40."""
    config = load_config(TINY, islands=2, ranks=2)
    assert config.schedule is not None
    for i in range(2):
        more: dict[str, Any] = {"config": config.digest(), "sampler": {}}
        checkpoint(begun, i, 40, config.schedule, outer_step=4, **more)
    (tmp_path / "child").mkdir()
    order = Order(length=20, nonce="n")
    child, _ = make_branch(begun, 40, "child", order, tmp_path / "child" / "run", config, force=False)
    return begun, child


@pytest.mark.parametrize("command", [launch, island])
def test_a_branch_needs_its_parent(tmp_path: Path, branched: tuple[RunDir, RunDir], command: Any) -> None:
    parent, child = branched
    text = told(*command(child.path.parent, TINY, "--resume", "--dry-run"))
    assert "# data to step 60: broad" in text, "the decay of the branch counts, not that of the config"
    assert "Add --resume" in both(*command(child.path.parent))
    saved = parent.island(0) / "checkpoints" / "step_00000040"
    manifest = json.loads((saved / "outer" / "manifest.json").read_text())
    (saved / "outer" / "manifest.json").write_text(json.dumps({**manifest, "digests": ["other"]}))
    line = both(*command(child.path.parent, TINY, "--resume"))
    assert "expected the checkpoint as it was when the branch was made, got another one" in line
    shutil.rmtree(parent.path)
    line = both(*command(child.path.parent, TINY, "--resume"))
    assert "expected the checkpoint that this branch began from, got none that is complete" in line


def test_a_resume_without_a_checkpoint_says_that_it_begins_anew(tmp_path: Path, begun: RunDir) -> None:
    for more, mark in (((), "[launch]"), (("--dry-run",), "#")):
        text = told(*launch(tmp_path, TINY, "--resume", *more))
        assert f"{mark} --resume: no checkpoint yet, begins anew in {begun.path}\n" in text
    text = told(*island(tmp_path, TINY, "--resume", "--dry-run"))
    assert f"# --resume: no checkpoint yet, begins anew in {begun.island(0)}; others that are further" in text


# ---- this machine ----


def test_ranks_that_share_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checks_module, command_module):
        monkeypatch.setattr(module, "cores", lambda: 3)
        monkeypatch.setattr(module, "visible_cuda_devices", list)
    line = (
        "warning: 4 ranks share the 3 cores of this machine, which has no GPU: a step takes about 1.33 times"
    )
    assert f"# {line}" in told(*launch(tmp_path, TINY, "--dry-run"))
    assert f"[launch] {line}" in told(*launch(tmp_path))
    assert "share the" not in told(*island(tmp_path, TINY, "--dry-run")), "its own 2 ranks have a core each"


def test_what_this_machine_lacks_is_refused_here_and_no_reason_against_a_dry_run(tmp_path: Path) -> None:
    words = island(tmp_path, TINY, "--interface", "nosuch0")
    assert (line := refused(*words)).startswith("--interface: expected an interface with an IPv4 address")
    assert f"# warning: on this machine a start would be refused: {line}\n" in told(*words, "--dry-run")


def test_an_address_that_only_this_machine_reaches(tmp_path: Path) -> None:
    words = list(island(tmp_path, TINY, "--interface", "lo", "--dry-run"))
    assert "name with --interface" not in told(*words)
    words[words.index("http://127.0.0.1:29510")] = "http://10.8.0.1:29510"
    assert "# warning: other islands reach this one at 127.0.0.1 from this machine alone" in told(*words)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A hostfile of this machine and another, and a pdsh that starts nothing."""
    (pdsh := tmp_path / "bin" / "pdsh").parent.mkdir()
    pdsh.write_text("#!/bin/sh\n")
    pdsh.chmod(0o755)
    monkeypatch.setenv("PATH", str(pdsh.parent), prepend=":")
    (file := tmp_path / "hosts").write_text("localhost slots=1\n192.0.2.7 slots=1\n")
    return file


def test_the_loopback_is_no_network_of_several_machines(tmp_path: Path, hosts: Path) -> None:
    words = list(island(tmp_path, TINY, "--hostfile", hosts, "--interface", "lo"))
    line = both(*words)
    assert line.startswith("--lighthouse: expected an address at which 192.0.2.7 of the hostfile reaches it")
    words[words.index("http://127.0.0.1:29510")] = "http://10.8.0.1:29510"
    line = both(*words)
    assert line.startswith("--interface: expected a network in which 192.0.2.7 of the hostfile reaches this")
    hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    assert run(*words, "--dry-run")[0] == 0, "both are this machine"


def test_devices_of_other_machines_are_not_those_of_this_one(
    tmp_path: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS"):  # which an import of DeepSpeed may have set
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command_module, "visible_cuda_devices", list)
    words = list(island(tmp_path, TINY, "--hostfile", hosts, "--dry-run"))
    words[words.index("http://127.0.0.1:29510")] = "http://10.8.0.1:29510"
    monkeypatch.setattr(command_module, "address_for", lambda *_: "10.8.0.2")
    text = told(*words)
    assert "each machine takes the devices that it has, else its CPU" in text
    assert "DS_ACCELERATOR" not in text and "OMP_NUM_THREADS" not in text
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert "\nDS_ACCELERATOR=cuda \\\n" in told(*words)
    hosts.write_text("localhost slots=2\n")
    monkeypatch.delenv("DS_ACCELERATOR")
    assert "\nDS_ACCELERATOR=cpu \\\n" in told(*words)


def test_who_is_this_machine() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and not is_loopback("127.example.com")
    assert is_here("127.0.1.1") and is_here("localhost") and not is_here("192.0.2.7")
