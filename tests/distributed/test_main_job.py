"""The main job in small through the real launcher: resume to the bit, killed islands, branches, bad input."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_wsd.data.sampler import MixSampler

pytestmark = pytest.mark.launch

ROOT = Path(__file__).resolve().parents[2]


def config(folder: Path, **changes: Any) -> Path:
    """A model of a few thousand parameters in bf16 with 8-bit moments; rounds every 4 steps."""
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WSD",
            "params": {"warmup_steps": 3, "decay_start": 14, "decay_steps": 6, "decay_shape": "linear"},
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "tensorboard": {"enabled": True},
        "megatron_wsd": {
            "islands": {"heartbeat_timeout_s": 3.0},
            "outer": {"lr": 3e-3},
            "sync": {"inner_steps": 4, "timeout_s": 20.0},
            "data": {
                "corpora": {"broad": "builtin:pydoc", "high_quality": "builtin:pydoc"},
                "mixes": {"stable": {"broad": 1.0}, "decay": {"high_quality": 0.5, "broad": 0.5}},
                "cache_dir": str(folder / "cache"),
            },
            "model": {
                "num_layers": 1,
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "num_attention_heads": 2,
                "num_query_groups": 1,
                "seq_length": 32,
                "recompute": True,
            },
            "log": {"interval_steps": 1, "eval_interval": 2, "eval_batches": 2},
            **changes,
        },
    }
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


def command(what: str, path: Path, run: Path, *more: str, islands: int = 2) -> list[str]:
    base = [sys.executable, "-m", "megatron_wsd", what, "--islands", str(islands), "--ranks", "2"]
    return [*base, "--config", str(path), "--run-dir", str(run), *more]


def run_job(path: Path, run: Path, *more: str, islands: int = 2) -> str:
    line = command("launch", path, run, *more, islands=islands)
    done = subprocess.run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def say(*words: object) -> str:
    """A ``megatron-wsd`` command that must go well."""
    line = [sys.executable, "-m", "megatron_wsd", *map(str, words)]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(run: Path, island: int, kind: str) -> list[dict[str, Any]]:
    lines = (run / f"island_{island}" / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def same(a: Any, b: Any, where: str) -> None:
    """Equal to the last bit, all the way down."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    elif isinstance(a, (int, float, str)):
        assert a == b, where


def same_checkpoints(a: Path, b: Path) -> int:
    """Compare two checkpoint folders file by file; the number of tensor files."""
    count = 0
    for file in sorted(p for p in a.rglob("*") if p.is_file()):
        twin = b / file.relative_to(a)
        if file.suffix == ".safetensors":
            same(load_file(file), load_file(twin), file.name)
        elif file.suffix == ".pt":
            mine, theirs = (torch.load(f, weights_only=False) for f in (file, twin))
            for whole in (mine, theirs):
                whole.pop("ds_config", None)  # names the run folder
            same(mine, theirs, file.name)
        elif file.name == "checkpoint.json":
            mine, theirs = (json.loads(f.read_text()) for f in (file, twin))
            same(mine["sampler"], theirs["sampler"], "sampler")
            same(mine["schedule"], theirs["schedule"], "schedule")
        count += file.suffix in (".safetensors", ".pt")
    return count


def test_stopped_and_resumed_equals_uninterrupted_to_the_bit(tmp_path: Path) -> None:
    path = config(tmp_path, checkpoint={"interval_steps": 6})
    whole, parts = tmp_path / "whole run", tmp_path / "parts"  # a path with a space
    out = run_job(path, whole)
    assert "anchor on broad" in out and (whole / "run.png").stat().st_size > 10_000
    run_job(path, parts, "--steps", "10")  # in the middle of a period of 4, before the mix switches at 14

    # Newer ones that are damaged must be set aside, and one that was never renamed ignored.
    kinds = ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "outer_rank00000.safetensors")
    for island, kind in enumerate(kinds):
        root = parts / f"island_{island}" / "checkpoints"
        good, flipped, torn = (root / f"step_000000{step}" for step in (10, 11, 19))
        shutil.copytree(good, torn)
        next(torn.rglob("outer_rank00001.safetensors")).unlink()
        shutil.copytree(good, flipped)
        file = next(flipped.rglob(f"*{kind}"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        shutil.copytree(good, root / "step_00000018.part")
    told = run_job(path, parts, "--resume")
    assert "resumed at step 10" in told
    for island, kind in enumerate(kinds):
        asides = sorted(p.name for p in (parts / f"island_{island}" / "checkpoints").glob("damaged_*"))
        assert asides == ["damaged_step_00000011", "damaged_step_00000019"]
        said = [e["message"] for e in records(parts, island, "event") if e["event"] == "damaged"]
        assert len(said) == 2 and all(text in told for text in said)
        assert kind in said[1] and said[1].endswith("taken instead: step_00000010")

    for island in range(2):
        names = [run / f"island_{island}" / "checkpoints" / "step_00000020" for run in (whole, parts)]
        assert same_checkpoints(*names) == 4 + 2 + 2
        ends = [records(run, island, "round")[-1] for run in (whole, parts)]
        assert ends[0]["digest"] == ends[1]["digest"]
        assert [r["step"] for r in records(parts, island, "round")] == [4, 8, 12, 16, 20]
        losses = [{r["step"]: r["loss"] for r in records(run, island, "step")} for run in (whole, parts)]
        assert losses[0] == losses[1] and sorted(losses[0]) == list(range(1, 21))
        phases = {r["step"]: r["phase"] for r in records(whole, island, "step")}
        assert (phases[3], phases[4], phases[14], phases[15], phases[20]) == (
            "warmup",
            "stable",
            "stable",
            "decay",
            "decay",
        )
        assert [e["step"] for e in records(whole, island, "event") if e["event"] == "mix"] == [14]
    for r0, r1 in zip(records(whole, 0, "round"), records(whole, 1, "round"), strict=True):
        assert r0["digest"] == r1["digest"] and r0["contributors"] == [0, 1]
    anchors = [
        {(e["step"], e["corpus"]): e["loss"] for e in records(whole, i, "eval") if e["target"] == "anchor"}
        for i in range(2)
    ]
    assert anchors[0] == anchors[1], "both islands hold the same anchor, so it must validate the same"
    assert list((whole / "island_0" / "tensorboard").rglob("events.*"))

    _refuses_what_does_not_belong(path, parts, tmp_path)


def _refuses_what_does_not_belong(path: Path, run: Path, folder: Path) -> None:
    """No rank starts: all of these are refused within seconds by the launcher."""
    raw = json.loads(path.read_text())
    raw["megatron_wsd"]["model"]["hidden_size"] = 32
    other = folder / "other.json"
    other.write_text(json.dumps(raw))
    for line, words in (
        (command("launch", path, run), ["--resume", "--run-dir"]),
        (command("launch", other, run, "--resume"), ["config"]),
        (command("launch", path, ROOT / "tests"), ["tests"]),
        (
            command("island", path, folder / "n", "--island", "0", "--lighthouse", "http://127.0.0.1:9"),
            ["lighthouse"],
        ),
    ):
        began = time.monotonic()
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "megatron-wsd: error:" in done.stderr and "Traceback" not in done.stderr
        for word in words:
            assert word in done.stderr
        assert time.monotonic() - began < 20
    assert not (folder / "n").exists()


def wait_for(run: Path, island: int, what: str, timeout: float = 200) -> None:
    """Until a record of the island's metrics contains ``what``."""
    path = run / f"island_{island}" / "metrics.jsonl"
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and what in path.read_text():
            return
        time.sleep(0.1)
    log = run / f"island_{island}" / "log.txt"
    raise AssertionError(f"no {what!r} within {timeout} s: {log.read_text()[-3000:] if log.exists() else ''}")


def ranks_of(run: Path, island: int) -> list[psutil.Process]:
    """Every process of one island of a run, the launcher's too."""
    found = []
    for p in psutil.process_iter():
        try:
            if str(run) in " ".join(p.cmdline()) and p.environ().get("MEGATRON_WSD_ISLAND") == str(island):
                found.append(p)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_killed_island_comes_back_and_a_decay_begins_by_command(tmp_path: Path) -> None:
    path = config(tmp_path, checkpoint={"interval_steps": 8})
    raw = json.loads(path.read_text())
    raw["scheduler"]["params"] = {"warmup_steps": 3}  # no end date
    raw["megatron_wsd"]["data"]["mixes"]["late"] = {"high_quality": 1.0}
    path.write_text(json.dumps(raw))
    run = tmp_path / "run"
    output = open(tmp_path / "output.txt", "w")  # noqa: SIM115
    job = subprocess.Popen(command("launch", path, run), stdout=output, stderr=output)
    try:
        wait_for(run, 0, '"outer_step": 3, "committed": true')
        wait_for(run, 1, '"event": "checkpoint"')
        for process in ranks_of(run, 1):
            process.send_signal(signal.SIGKILL)
        wait_for(run, 0, '"event": "alone"')
        facts = json.loads((run / "run.json").read_text())
        again = [*command("island", path, run), "--island", "1", "--resume"]
        back = subprocess.Popen([*again, "--lighthouse", facts["lighthouse"]], stdout=output, stderr=output)
        wait_for(run, 1, '"event": "heal"')
        wait_for(run, 0, '"event": "back"')
        newest = records(run, 0, "round")[-1]["outer_step"]
        wait_for(run, 0, f'"outer_step": {newest + 3}, "committed": true')
        decay = [sys.executable, "-m", "megatron_wsd", "decay-now", str(run)]
        ordered = [*decay, "--steps", "6", "--shape", "linear", "--data-mix", "late", "--wait", "120"]
        done = subprocess.run(ordered, capture_output=True, text=True, timeout=180)
        assert "Agreed by all islands at step" in done.stdout, done.stdout + done.stderr
        twice = subprocess.run(ordered, capture_output=True, text=True, timeout=60)
        assert twice.returncode == 2 and "--cancel" in twice.stderr
        assert back.wait(120) == 0  # the run ends with its decay
        job.wait(120)
    finally:
        job.kill()
        for island in range(2):
            for process in ranks_of(run, island):
                process.kill()
        output.close()
    told = (tmp_path / "output.txt").read_text()
    assert "island 1 is gone; going on with [0]" in told
    assert "island 1 failed (killed by SIGKILL)" in told
    assert job.returncode == 1, "one of its islands failed, whatever came after"

    survivor = {r["outer_step"]: r for r in records(run, 0, "round") if r["committed"]}
    returned = {r["outer_step"]: r for r in records(run, 1, "round") if r["committed"]}
    healed_at = next(r["time"] for r in records(run, 1, "event") if r["event"] == "heal")
    after = sorted(n for n, r in returned.items() if r["time"] >= healed_at)
    assert survivor[after[0]]["contributors"] == [0], "its first round is without its own contribution"
    assert survivor[after[0]]["islands"] == [0, 1]
    assert survivor[after[1]]["contributors"] == [0, 1]
    for n in after:
        if n in survivor:
            assert survivor[n]["digest"] == returned[n]["digest"]
            assert survivor[n]["step"] == returned[n]["step"]
    assert any(r["islands"] == [0] for r in survivor.values())
    assert max(survivor) == max(returned)

    # The decay was begun by command, at one step on both, and both followed one schedule to its end.
    begins = {i: [e["step"] for e in records(run, i, "event") if e["event"] == "order"] for i in range(2)}
    assert begins[0] == begins[1] and len(begins[0]) == 1
    start = begins[0][0]
    assert f"begins at step {start} and ends at step {start + 6}, and the run with it." in done.stdout
    rates = [{r["step"]: r["lr"] for r in records(run, i, "step")} for i in range(2)]
    assert max(rates[0]) == max(rates[1]) == start + 6
    assert all(rates[1][step] == rates[0][step] for step in rates[1] if step > start)
    peak = rates[0][start]
    decayed = [rates[0][start + k] for k in range(1, 7)]
    assert decayed == pytest.approx([peak * (1 - k / 6) for k in range(6)], rel=1e-12)
    for island in range(2):
        mixes = [e for e in records(run, island, "event") if e["event"] == "mix"]
        assert [(e["step"], "'late'" in e["message"]) for e in mixes] == [(start, True)]
        assert records(run, island, "event")[-1]["event"] == "finish"
    for island in range(2):
        assert not ranks_of(run, island)

    _branches_end_and_leave_their_parent_alone(path, run, start, tmp_path)


def _branches_end_and_leave_their_parent_alone(path: Path, run: Path, start: int, folder: Path) -> None:
    """Two branches off one stable checkpoint, with other data; one of them with other numbers of islands."""
    steps = [{int(p.name[5:]) for p in run.glob(f"island_{i}/checkpoints/step_*")} for i in range(2)]
    step = max(n for n in set.intersection(*steps) if n < start)
    before = digests(run)
    raw = json.loads((run / "config.json").read_text())
    raw["megatron_wsd"]["data"]["mixes"]["even"] = {"high_quality": 0.5, "broad": 0.5}
    (more := folder / "more.json").write_text(json.dumps(raw))
    late, even = folder / "late", folder / "even"
    flags = ("--decay-steps", 6, "--shape", "linear")
    say("branch", f"{run}@{step}", "--name", "late", *flags, "--data-mix", "late", "--run-dir", late)
    say(
        "branch",
        f"{run}@{step}",
        "--name",
        "even",
        *flags,
        "--data-mix",
        "even",
        "--run-dir",
        even,
        "--config",
        more,
    )
    refused = subprocess.run(
        command("launch", path, even, "--resume"), capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2 and "data.mixes.even" in refused.stderr, refused.stderr

    told = run_job(even / "config.json", even, "--resume")
    assert f"decay of 6 steps (linear) from step {step}" in told
    told = run_job(path, late, "--resume", islands=1)  # the other goes on with one island
    assert f"islands 2 -> 1 from step {step}: global batch 16 -> 8 samples, 512 -> 256 tokens a step" in told
    assert {k: v for k, v in digests(run).items() if not k.startswith("branches/")} == before

    end = step + 6
    for branch, mix, islands in ((even, "even", [0, 1]), (late, "late", [0])):
        for island in islands:
            assert records(branch, island, "event")[-1]["event"] == "finish"
            mixes = [e for e in records(branch, island, "event") if e["event"] == "mix"]
            assert len(mixes) == 1 and repr(mix) in mixes[0]["message"]
        last = [records(branch, i, "round")[-1] for i in islands]
        assert all(r["digest"] == last[0]["digest"] and r["step"] == end for r in last)
        assert last[0]["contributors"] == islands
        rates = {r["step"]: r["lr"] for r in records(branch, 0, "step")}
        assert sorted(rates) == list(range(step + 1, end + 1))
        assert [rates[step + k] for k in range(1, 7)] == pytest.approx([2e-3 * (1 - k / 6) for k in range(6)])

    # Of each corpus every number was drawn once, by whichever island under whichever number of them.
    manifest = late / "island_0" / "checkpoints" / f"step_{end:08d}" / "checkpoint.json"
    state = json.loads(manifest.read_text())["sampler"]
    parent_manifest = run / "island_0" / "checkpoints" / f"step_{step:08d}" / "checkpoint.json"
    parent = json.loads(parent_manifest.read_text())
    before_it = parent["sampler"]
    drawn: dict[str, list[int]] = {}
    for island, steps_taken in enumerate((end, step)):
        sampler = MixSampler.from_state(state if island == 0 else before_it, island)
        for k in range(8 * steps_taken):
            corpus, number = sampler.number(k)
            drawn.setdefault(corpus, []).append(number)
    assert sorted(drawn) == ["broad", "high_quality"]
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in drawn.values())

    # What was consumed, beside what the parent had consumed until then.
    say("report", late)
    data = {run.name: json.loads((run / "summary.json").read_text())["data"] for run in (late, even)}
    samples = {name: part["own"]["all"]["corpora"] for name, part in data.items()}
    assert samples["late"]["high_quality"]["samples"] == 8 * 6
    assert samples["even"]["high_quality"]["samples"] == samples["even"]["broad"]["samples"] == 8 * 6
    assert data["even"]["own"]["islands"]["1"]["corpora"]["broad"]["tokens"] == 8 * 3 * 32
    assert data["late"]["inherited"] == data["even"]["inherited"]
    assert list(data["late"]["inherited"]["all"]["mixes"]) == ["stable"]
    assert data["late"]["inherited"]["all"]["corpora"]["broad"]["tokens"] == parent["tokens"]

    tree = say("lineage", late)
    for name, last_step in (("run", start + 6), (f"late @{step}", end), (f"even @{step}", end)):
        assert f"{name}: step {last_step}, " in tree, tree
    assert tree.count("loss of the anchor: broad ") == 3
    assert tree.count(f"decay {step + 1}-{end}") == 2


def digests(folder: Path) -> dict[str, str]:
    """Of every file of a folder."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
