"""What the doctor finds, and what it says about what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_wsd.cli import app
from megatron_wsd.cli.doctor import _apex, _package, _program


def test_here_the_quickstart_can_run_and_the_json_says_so() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = {finding["name"]: finding for finding in json.loads(result.output)}
    assert result.exit_code == 0
    needed = {"python", "torch", "deepspeed", "megatron-core", "torchft", "extension"}
    assert {name for name, finding in found.items() if finding["needed"]} == needed
    assert all(found[name]["ok"] for name in needed)
    assert found["deepspeed"]["found"].startswith(importlib.metadata.version("deepspeed"))
    assert "threads" in found["extension"]["found"] and "isa" in found["extension"]["found"]
    for finding in found.values():
        assert finding["ok"] or finding["remedy"]


def test_something_missing_is_exit_code_1_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "The quickstart cannot run: python." in result.output
    assert "PYTHON=python3.11 ./launch/setup.sh" in result.output


def test_a_package_or_program_that_is_not_there() -> None:
    assert not _package("no-such-package-of-ours").ok
    finding = _program("no-such-program", "Install it.")
    assert (finding.ok, finding.needed, finding.remedy) == (False, False, "Install it.")


def make_apex(folder: Path, files: dict[str, str], version: str) -> None:
    for name, text in files.items():
        (folder / "apex" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "apex" / name).write_text(text)
    about = folder / f"apex-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("files", "ok", "says"),
    [
        ({}, False, "not installed"),
        ({"__init__.py": "", "lib/__init__.py": ""}, False, "0.9: not NVIDIA's, but the unrelated package"),
        ({"__init__.py": "", "optimizers/__init__.py": "class FusedAdam: pass"}, True, "NVIDIA's, 0.9"),
        (
            {"__init__.py": "", "optimizers/__init__.py": "raise ImportError('undefined symbol')"},
            False,
            "0.9, does not load: ImportError: undefined symbol",
        ),
    ],
)
def test_apex_is_told_from_its_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], ok: bool, says: str
) -> None:
    if files:
        make_apex(tmp_path, files, "0.9")
    elif "apex" in {d.metadata["Name"] for d in importlib.metadata.distributions()}:
        pytest.skip("some apex is installed here")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = _apex()
    assert (finding.ok, finding.needed) == (ok, False)
    assert finding.found.startswith(says)
