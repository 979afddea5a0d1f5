"""Sources of documents, and their way into Megatron's .bin/.idx and back."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from megatron_wsd.cli.prepare_data import prepare_data
from megatron_wsd.data.corpus import digest_source, open_source
from megatron_wsd.data.indexed import TokenFile, bin_path, idx_path, megatron_indexed_dataset
from megatron_wsd.data.loader import open_corpora
from megatron_wsd.data.prepare import ensure_builtin_corpora, manifest_path, prepare, read_manifest
from megatron_wsd.data.tokenizer import ByteTokenizer
from megatron_wsd.errors import DataError

BYTES = ByteTokenizer()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of five documents in three formats, and what is no document."""
    folder = tmp_path / "my text"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"second \xff\n")
    (folder / "a.md").write_bytes(b"first\n")
    (folder / "sub" / "c.py").write_bytes(b"fifth = 5\n")
    (folder / "lines.jsonl").write_bytes(
        b'{"text": "third"}\n\n{"text": ""}\n{"text": "f\\u00f6rth", "n": 1}\n'
    )
    (folder / "empty.txt").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"not text")
    return folder


@pytest.fixture
def pair(tmp_path: Path, text: Path) -> Path:
    """The prefix of that text, prepared."""
    prefix = tmp_path / "out" / "some.text"
    prepare(f"text:{text}", BYTES, prefix)
    return prefix


# --- sources


def test_a_folder_gives_its_documents_in_order(text: Path) -> None:
    documents = list(open_source(f"text:{text}").read())
    assert [data for _, data in documents] == [
        b"first\n",
        b"second \xff\n",
        b"third",
        "förth".encode(),
        b"fifth = 5\n",
    ]
    assert len({name for name, _ in documents}) == 5


def test_a_large_file_is_cut_at_line_ends(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_wsd.data.corpus._PIECE_BYTES", 10)
    (text / "b.txt").write_bytes(b"".join(b"line %d\n" % i for i in range(9)))
    pieces = [data for _, data in open_source(f"text:{text / 'b.txt'}").read()]
    assert len(pieces) > 1 and all(piece.endswith(b"\n") for piece in pieces)
    assert b"".join(pieces) == (text / "b.txt").read_bytes()


def test_the_standard_library_is_read_without_its_tests_and_help_topics() -> None:
    source = open_source("builtin:stdlib")
    names = [name for name, _ in source.read()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
    assert not [name for name in names if skipped & set(name.split("/"))]
    assert digest_source(source.read()) == digest_source(open_source("builtin:stdlib").read())


def test_the_help_topics_are_sorted() -> None:
    documents = list(open_source("builtin:pydoc").read())
    assert [name for name, _ in documents] == sorted(name for name, _ in documents)
    assert len(documents) > 50 and dict(documents)["assert"].startswith(b'The "assert" statement')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"text": "good"}\n{"text": \n',
            r"bad\.jsonl:2: expected a json object, got Expecting value at column",
        ),
        (b'{"content": "x"}\n', r"bad\.jsonl:1: .* got the keys \['content'\]"),
        (b'["x"]\n', r"bad\.jsonl:1: .* got list"),
        (b'{"text": 3}\n', r'bad\.jsonl:1: expected an object with a string "text", got "text": 3'),
        (b"\n\n", "no text in any of its files"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(f"text:{tmp_path / 'bad.jsonl'}", BYTES, tmp_path / "out" / "x")
    assert not (tmp_path / "out").exists()


def test_missing_and_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for spec, message in [
        (f"text:{tmp_path / 'nowhere'}", "does not exist"),
        (f"text:{tmp_path / 'empty.txt'}", "a file with text in it"),
        (f"text:{tmp_path / 'folder'}", "that are not empty"),
        ("text:", "expected 'builtin:stdlib'"),
        ("builtin:wikipedia", "expected 'builtin:stdlib'"),
    ]:
        with pytest.raises(DataError, match=message):
            open_source(spec)


# --- writing


def test_megatron_reads_back_what_was_written_token_by_token(text: Path, pair: Path) -> None:
    documents = [[*data, BYTES.eod] for _, data in open_source(f"text:{text}").read()]
    dataset = megatron_indexed_dataset().IndexedDataset(str(pair))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))

    stream = TokenFile(pair)
    flat = [token for document in documents for token in document]
    assert (stream.num_tokens, stream.num_sequences) == (len(flat), len(documents))
    everything = stream.tokens(0, stream.num_tokens)
    assert everything.tolist() == flat and everything.dtype == np.int64
    assert stream.tokens(4, 9).tolist() == flat[4:13]  # across the end of a document
    assert stream.tokens(stream.num_tokens, 0).size == 0
    for start, length in [(-1, 2), (len(flat) - 1, 2), (0, -1)]:
        with pytest.raises(IndexError):
            stream.tokens(start, length)


def test_the_manifest_says_what_the_files_hold(pair: Path) -> None:
    manifest = read_manifest(pair)
    assert manifest is not None
    assert (manifest["documents"], manifest["max_token_id"]) == (5, 256)
    assert manifest["tokens"] == manifest["source_bytes"] + 5 == TokenFile(pair).num_tokens


def test_preparing_again_changes_nothing(text: Path, pair: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in pair.parent.iterdir()}
    moved = text.rename(text.with_name("moved"))  # where the text lies does not matter
    _, written = prepare(f"text:{moved}", BYTES, pair)
    assert not written
    assert {path: path.stat().st_mtime_ns for path in pair.parent.iterdir()} == before
    assert not list(pair.parent.glob("*.partial*"))


def test_other_text_replaces_files_only_by_force(text: Path, pair: Path) -> None:
    old = bin_path(pair).read_bytes()
    opened = TokenFile(pair)
    (text / "a.md").write_bytes(b"First\n")
    with pytest.raises(DataError, match=r"another source_sha256.*--force"):
        prepare(f"text:{text}", BYTES, pair)
    assert bin_path(pair).read_bytes() == old
    manifest, written = prepare(f"text:{text}", BYTES, pair, force=True)
    assert written and manifest == read_manifest(pair)
    assert TokenFile(pair).tokens(0, 5).tobytes() == np.array([*b"First"]).tobytes()
    assert opened.tokens(0, 1)[0] == ord("f")  # a run that reads the old files keeps them


def test_files_of_someone_else_are_not_replaced(text: Path, pair: Path) -> None:
    manifest_path(pair).unlink()
    with pytest.raises(DataError, match="that were not made here"):
        prepare(f"text:{text}", BYTES, pair)
    manifest_path(pair.with_name("fresh")).write_text('{"mine": true}')
    with pytest.raises(DataError, match=r"fresh\.json that were not made here"):
        prepare(f"text:{text}", BYTES, pair.with_name("fresh"))


def test_files_that_a_crash_left_torn_are_written_again(text: Path, pair: Path) -> None:
    whole = bin_path(pair).read_bytes()
    for tear in (
        lambda: os.truncate(bin_path(pair), 10),
        lambda: idx_path(pair).unlink(),
        # killed between two of the renames
        lambda: (manifest_path(pair).write_text('{"state": "writing"}'), bin_path(pair).write_bytes(b"new")),
    ):
        tear()
        assert read_manifest(pair) is None
        _, written = prepare(f"text:{text}", BYTES, pair)
        assert written and bin_path(pair).read_bytes() == whole


def test_a_full_disk_leaves_what_was_there(text: Path, pair: Path) -> None:
    before = {path.name: path.read_bytes() for path in pair.parent.iterdir()}
    (text / "b.txt").write_bytes(b"more text than fits\n" * 2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # writes past it fail as on a full disk
    try:
        with pytest.raises(DataError, match=r"File too large.*Free some space"):
            prepare(f"text:{text}", BYTES, pair, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in pair.parent.iterdir()} == before


def test_text_that_changes_while_it_is_read_is_noticed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Meddler(ByteTokenizer):
        def encode(self, data: bytes) -> np.ndarray:
            (text / "sub" / "c.py").write_bytes(b"changed")
            return super().encode(data)

    with pytest.raises(DataError, match="a change between two readings"):
        prepare(f"text:{text}", Meddler(), tmp_path / "x")
    assert not bin_path(tmp_path / "x").exists() and not list(tmp_path.glob("*.partial*"))


# --- opening


def _corrupt_magic(pair: Path) -> None:
    idx_path(pair).write_bytes(b"PK\x03\x04" + idx_path(pair).read_bytes()[4:])


def _corrupt_pointer(pair: Path) -> None:
    raw = bytearray(idx_path(pair).read_bytes())
    raw[34 + 4 * 5 + 8 : 34 + 4 * 5 + 16] = struct.pack("<q", 2**40)
    idx_path(pair).write_bytes(raw)


def _other_partner(pair: Path) -> None:
    other = pair.with_name("other")
    (pair.parent / "o.txt").write_bytes(b"something else")
    prepare(f"text:{pair.parent / 'o.txt'}", BYTES, other)
    shutil.copy(idx_path(other), idx_path(pair))


def _float_tokens(pair: Path) -> None:
    raw = bytearray(idx_path(pair).read_bytes())
    raw[17] = 7
    idx_path(pair).write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pair: bin_path(pair).unlink(), r"text\.bin: expected a file, got nothing there"),
        (lambda pair: idx_path(pair).unlink(), r"text\.idx: expected a file, got nothing there"),
        (lambda pair: os.truncate(bin_path(pair), 0), r"text\.bin: .* got 0 bytes"),
        (lambda pair: os.truncate(idx_path(pair), 0), r"text\.idx: .* got 0 bytes"),
        (lambda pair: os.truncate(idx_path(pair), 20), r"text\.idx: expected a Megatron index.* 20 bytes"),
        (lambda pair: os.truncate(idx_path(pair), 100), r"text\.idx: expected 142 bytes .* got 100 bytes"),
        (lambda pair: os.truncate(bin_path(pair), 12), r"text\.bin: expected \d+ bytes, .* got 12 bytes"),
        (_corrupt_magic, r"text\.idx: expected a Megatron index"),
        (_corrupt_pointer, r"text\.idx: expected sequences stored back to back, got sequence 1 elsewhere"),
        (_other_partner, r"text\.bin: expected 30 bytes, as some\.text\.idx says, got \d+ bytes"),
        (_float_tokens, r"text\.idx: .* code 7"),
    ],
)
def test_torn_mismatched_and_empty_files_are_named(
    pair: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(pair)
    with pytest.raises(DataError, match=message) as caught:
        TokenFile(pair)
    assert caught.value.remedy


def test_a_path_of_text_given_as_a_prefix_gets_the_right_hint(text: Path) -> None:
    with pytest.raises(DataError, match="write text:"):
        TokenFile(text)


def test_an_ending_on_the_prefix_is_tolerated(pair: Path) -> None:
    assert TokenFile(bin_path(pair)).num_tokens == TokenFile(idx_path(pair)).num_tokens


def test_vocabulary_and_fingerprint(tmp_path: Path, text: Path, pair: Path) -> None:
    corpora = open_corpora({"a": str(pair), "b": f"text:{text}"}, tmp_path / "cache", "byte")
    corpora.check_vocab(257)
    for manifest in (True, False):  # from the manifest, and by reading the tokens
        if not manifest:
            manifest_path(pair).unlink()
        with pytest.raises(DataError, match=r"data\.corpora\.a: expected token ids in \[0, 256\)"):
            corpora.check_vocab(256)
    prints = corpora.fingerprints()
    assert prints["a"] == prints["b"]  # the same tokens in two files
    (text / "a.md").write_bytes(b"First\n")
    changed = open_corpora({"b": f"text:{text}"}, tmp_path / "cache", "byte")
    assert changed.fingerprints()["b"] != prints["b"]
    assert len(list((tmp_path / "cache").glob("b-*.bin"))) == 2  # the earlier run keeps its files


def test_files_of_another_tokenizer_are_refused(tmp_path: Path, pair: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="Name the tokenizer it was prepared with"):
        open_corpora({"a": str(pair)}, tmp_path / "cache", f"hf:{folder}")


def test_two_processes_make_the_builtin_corpora_at_once(tmp_path: Path) -> None:
    script = (
        "import sys, time; from megatron_wsd.data import prepare as p; p.megatron_indexed_dataset(); "
        "real = p._write_locked\n"
        # long enough in the lock for the other to arrive
        "def slow(plan):\n    print('WROTE', plan.prefix.name); time.sleep(1); return real(plan)\n"
        "p._write_locked = slow\n"
        "for prefix in p.ensure_builtin_corpora(sys.argv[1]).values(): print('GOT', prefix)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [worker.communicate(timeout=300)[0].splitlines() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert len([line for out in lines for line in out if line.startswith("WROTE")]) == 2  # one each corpus
    got = [[line for line in out if line.startswith("GOT")] for out in lines]
    assert got[0] == got[1] and len(got[0]) == 2
    prefixes = ensure_builtin_corpora(tmp_path / "cache")
    assert [f"GOT {prefix}" for prefix in prefixes.values()] == got[0]
    assert TokenFile(prefixes["broad"]).num_tokens > TokenFile(prefixes["high_quality"]).num_tokens > 10**5
    assert not list((tmp_path / "cache").glob("*.partial*"))


# --- the command


def _run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(prepare_data)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prepares_named_texts(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--out", out, "--text", f"mine={text}", "--text", text / "b.txt")
    first = _run(*arguments)
    assert first.exit_code == 0, first.output
    assert first.output.count("written") == 2
    assert TokenFile(out / "mine").num_sequences == 5 and TokenFile(out / "b").num_sequences == 1
    config = json.loads("{" + first.output.split("In a config: ")[1].strip() + "}")
    assert config["corpora"] == {"mine": str(out / "mine"), "b": str(out / "b")}
    assert _run(*arguments).output.count("up to date") == 2


def test_the_command_says_what_it_skips(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.html", "c.html", "d.md"):
        (tmp_path / "in" / name).write_text("x")
    output = _run("--out", tmp_path / "out", "--text", f"mine={tmp_path / 'in'}").output
    assert "mine: 2 of 4 files are read (*.jsonl, *.md, *.py, *.txt); skipped: 2 .html\n" in output


@pytest.mark.parametrize("content", ["größer".encode("latin-1"), "more".encode("utf-16"), b"a\0b"])
def test_the_command_says_which_text_is_no_utf8(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("größer", encoding="utf-8")
    (tmp_path / "in" / "b.txt").write_bytes(content)
    flags = "--out", tmp_path / "out", "--text", f"mine={tmp_path / 'in'}"
    for _ in range(2):  # also when nothing is written any more
        told = "mine: 1 of 2 documents are no UTF-8 text, the first b.txt: their bytes are taken as they are"
        assert told in _run(*flags).output


def test_an_out_that_is_no_folder_is_not_a_matter_of_space(tmp_path: Path, text: Path) -> None:
    (tmp_path / "file").touch()
    result = _run("--out", tmp_path / "file", "--text", text)
    assert isinstance(result.exception, DataError) and "Free some space" not in str(result.exception)


def test_the_command_writes_nothing_when_one_text_is_wrong(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    result = _run("--out", out, "--text", text, "--text", tmp_path / "nowhere")
    assert isinstance(result.exception, DataError) and not out.exists()
    result = _run("--out", out, "--text", f"x={text}", "--text", f"x={text / 'a.md'}")
    assert isinstance(result.exception, DataError) and not out.exists()


def test_the_command_makes_the_builtin_corpora_by_default(tmp_path: Path) -> None:
    result = _run("--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.glob("*.bin")} == {"broad.bin", "high_quality.bin"}
