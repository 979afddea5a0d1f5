"""What a run tells while it runs: its lines, its warnings, and the scalars in DeepSpeed's monitors."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wsd.metrics import Metrics, say
from megatron_wsd.monitors import Monitors, monitors_of, scalars

ROOT = Path(__file__).resolve().parents[2]


def write_some(metrics: Metrics) -> None:
    metrics.write("start", island=0, step=0, parameters=5, unigram_entropy={"broad": 3.0})
    told = {"loss": 2.5, "lr": 1e-3, "phase": "stable", "tokens": 100, "tokens_per_s": 50.0, "grad_norm": 0.5}
    metrics.write("step", step=10, **told)
    each: dict[str, Any] = {"staleness": {"0": 0, "1": 3}, "gates": {"0": 1.0, "1": 0.5}}
    metrics.write(
        "round", step=10, outer_step=1, committed=True, islands=[0, 1], island_bytes=7, seconds=0.25, **each
    )
    metrics.write("eval", step=10, outer_step=1, target="anchor", corpus="broad", loss=2.75)
    metrics.write("adopt", step=12, fragment=1, version=4, lag=2, waited_steps=6)
    metrics.event("checkpoint", 12, "complete")
    metrics.close()


EXPECTED = {
    "step/loss": (10, 2.5),
    "step/lr": (10, 1e-3),
    "step/tokens_per_s": (10, 50.0),
    "round/outer_step": (10, 1.0),
    "round/staleness/island_1": (10, 3.0),
    "round/gates/island_1": (10, 0.5),
    "round/island_bytes": (10, 7.0),
    "round/seconds": (10, 0.25),
    "eval/anchor/broad/loss": (10, 2.75),
    "adopt/lag": (12, 2.0),
}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's monitors ask which rank they are on; there is no process group here."""
    import deepspeed.comm

    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda *_: 0)


def monitor(config: dict[str, Any]) -> Any:
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.monitor import MonitorMaster

    return MonitorMaster(get_monitor_config(config))


def test_the_csv_monitor_of_deepspeed_gets_all_scalars(one_rank: None, tmp_path: Path) -> None:
    config = monitors_of({"csv_monitor": {"enabled": True, "job_name": "job"}}, tmp_path, 1)
    write_some(Metrics(tmp_path / "metrics.jsonl", Monitors(monitor(config), 8)))
    folder = tmp_path / "island_1" / "csv_monitor" / "job"
    for tag, (step, value) in EXPECTED.items():
        with (folder / f"megatron_wsd_{tag.replace('/', '_')}.csv").open() as file:
            header, row = list(csv.reader(file))
        assert header[0] == "step" and (int(row[0]), float(row[1])) == (step, value), tag


def test_the_tensorboard_monitor_of_deepspeed_gets_all_scalars(one_rank: None, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    given = {"tensorboard": {"enabled": True, "job_name": "job", "output_path": str(tmp_path / "tb")}}
    write_some(Metrics(tmp_path / "metrics.jsonl", Monitors(monitor(monitors_of(given, tmp_path, 0)), 8)))
    events = EventAccumulator(str(tmp_path / "tb" / "island_0" / "job"))
    events.Reload()
    for tag, (step, value) in EXPECTED.items():
        (event,) = events.Scalars(f"megatron_wsd/{tag}")
        assert (event.step, event.value) == (step, pytest.approx(value, rel=1e-6)), tag  # stored as float32


def offline_records(file: Path) -> Iterator[Any]:
    """The records of a W&B file: 7 bytes of its own, then LevelDB's log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, so_far = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        so_far += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(so_far)
            yield record
            so_far = b""


WANDB_RUN = """
import json, sys
from collections.abc import Iterator
from pathlib import Path
import deepspeed.comm
deepspeed.comm.get_rank = lambda *_: 0
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from megatron_wsd.metrics import Metrics
from megatron_wsd.monitors import Monitors, finish_monitors, monitors_of
run = Path(sys.argv[1])
config = monitors_of({"wandb": {"enabled": True, "project": "p"}}, run, 1)
master = MonitorMaster(get_monitor_config(config))
metrics = Metrics(run / "metrics.jsonl", Monitors(master, 8))
master.write_events([("Train/Samples/lr", 0.5, 80)])  # as DeepSpeed does, by samples
metrics.write("step", step=10, loss=2.5)
metrics.write("round", step=8, outer_step=1, staleness={"0": 3})  # of a step that was before
master.write_events([("Train/Samples/lr", 0.25, 88)])
finish_monitors(0)
import os
os._exit(0)  # as a rank ends
"""


def test_wandb_gets_all_scalars_though_the_rank_ends_at_once(tmp_path: Path) -> None:
    run = tmp_path / "first"
    (run / "island_1").mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {
        "WANDB_MODE": "offline"
    }
    line = [sys.executable, "-c", WANDB_RUN, str(run)]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (run / "island_1").glob("wandb/offline-run-*/run-*.wandb")
    steps: dict[int, dict[str, float]] = {}
    for record in offline_records(file):
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.run_group, record.run.display_name) == (
                "p",
                "first",
                "island_1",
            )
        if record.WhichOneof("record_type") == "history":
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            steps[row["_step"]] = row
    assert sorted(steps) == [80, 88]
    told = {
        "Train/Samples/lr": 0.5,
        "megatron_wsd/step/loss": 2.5,
        "megatron_wsd/round/outer_step": 1.0,
        "megatron_wsd/round/staleness/island_0": 3.0,
        "megatron_wsd/inner_step": 8.0,
        "megatron_wsd/position": 8.0,
    }
    assert {name: steps[80][name] for name in told} == told
    assert not (tmp_path / "wandb").exists()


def test_islands_of_one_json_write_apart_and_nothing_else_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_NAME", "WANDB_DIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    run = tmp_path / "first"
    given = {
        "tensorboard": {"enabled": True},
        "csv_monitor": {"enabled": False},
        "wandb": {"enabled": True, "project": "p"},
        "train_batch_size": 8,
    }
    before = json.dumps(given)
    assert monitors_of(given, run, 3) == {
        **given,
        "tensorboard": {"enabled": True, "output_path": str(run / "island_3" / "tensorboard")},
        "wandb": {"enabled": True, "project": "p", "group": "first"},
    }
    assert json.dumps(given) == before
    assert os.environ["WANDB_NAME"] == "island_3" and os.environ["WANDB_DIR"] == str(run / "island_3")
    own = {"wandb": {"enabled": True, "group": "mine"}}
    assert monitors_of(own, run, 0) == own
    assert monitors_of({}, run, 0) == {}


def test_what_is_no_number_is_no_scalar() -> None:
    fields = {"step": 9, "position": 5, "phase": "stable", "loss": None, "islands": [0]}
    fields["gates"] = {"0": None, "1": 0.5}
    assert scalars("step", fields) == [("megatron_wsd/step/gates/island_1", 0.5, 5)]


def test_a_record_has_the_step_of_its_island_and_of_the_run(tmp_path: Path) -> None:
    sent: list[tuple[str, float, int]] = []
    master: Any = SimpleNamespace(csv_monitor=SimpleNamespace(write_events=sent.extend))
    metrics = Metrics(tmp_path / "m", Monitors(master, 8))
    metrics.write("step", step=10, loss=2.5)
    metrics.position = lambda: 4
    metrics.write("step", step=12, loss=2.25)
    metrics.write("eval", step=12, position=3, target="anchor", corpus="broad", loss=2.0)
    metrics.close()
    records = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [(r["step"], r["position"]) for r in records] == [(10, 10), (12, 4), (12, 3)]
    assert [x for _, _, x in sent] == [10, 4, 3], "islands of unequal speed are drawn by the step of the run"


def test_a_line_carries_island_and_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_wsd.cli.logs import console_text

    monkeypatch.delenv("MEGATRON_WSD_ISLAND", raising=False)
    say("step 5")
    monkeypatch.setenv("MEGATRON_WSD_ISLAND", "2")
    monkeypatch.setenv("RANK", "3")
    say("step 5")
    say("error: island 2 rank 3: x")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["megatron-wsd: [island 2 rank 3] step 5", "megatron-wsd: error: island 2 rank 3: x"]
    assert [console_text(line) for line in lines] == ["step 5", "step 5", "error: island 2 rank 3: x"]


@pytest.mark.parametrize(("rank", "of_frameworks"), [(0, 1), (1, 0)])
def test_every_warning_is_said_once_with_island_and_rank(rank: int, of_frameworks: int) -> None:
    program = f"""
import logging, warnings
from megatron_wsd.metrics import set_up_logging
set_up_logging("2", {rank})
for place in range(2):
    for _ in range(3):
        warnings.warn("slow path\\nin two lines")
    warnings.warn("slow path\\nin two lines")
    logging.getLogger("megatron_wsd.x").warning("scalar %s", "fallback")
    logging.getLogger("megatron_wsd.x").info("step")
    logging.getLogger("torchft").warning("noise")
"""
    env = {**os.environ, "MEGATRON_WSD_LOG": "INFO"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    lines = [line.split(" ", 2)[2] for line in done.stderr.splitlines() if "[island" in line]
    own = f"[island 2 rank {rank}] WARNING megatron_wsd.x: scalar fallback"
    assert lines.count(own) == 1
    assert sum("UserWarning: slow path in two lines" in line for line in lines) == of_frameworks
    assert sum("INFO megatron_wsd.x: step" in line for line in lines) == 2
    assert "noise" not in done.stderr


def test_a_console_that_is_gone_ends_nothing() -> None:
    code = (
        "from megatron_wsd.metrics import say\nimport sys\nsay('1')\nsys.stdin.read()\nsay('2')\nsay('3')\n"
    )
    code += "sys.stderr.write('saved')"
    line = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as child:
        assert child.stdout is not None and child.stdin is not None and child.stderr is not None
        assert child.stdout.readline() == "megatron-wsd: 1\n"
        child.stdout.close()
        child.stdin.close()
        assert child.stderr.read() == "saved" and child.wait(60) == 0
