"""The launcher with the real deepspeed launcher, a real lighthouse, and a trainer of a few lines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_wsd.cli.command import Island
from megatron_wsd.cli.launch import _Watch
from megatron_wsd.config import load_config
from megatron_wsd.rundir import is_held, open_run

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "launch" / "configs" / "tiny_cpu.json"

# One all-reduce a step, a round every 5 steps, SIGTERM obeyed at a step boundary that all ranks agree on.
TRAINER = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
for flag in ("--config", "--run-dir", "--steps", "--local_rank"):
    parser.add_argument(flag)
args = parser.parse_args()
island, rank = os.environ["MEGATRON_WSD_ISLAND"], int(os.environ["RANK"])
if os.environ.get("TEST_DIES") == f"{island}.{rank}":
    print(f"megatron-wsd: error: island {island} rank {rank}: data.corpora.broad: no such file", flush=True)
    sys.exit(2)

import deepspeed, deepspeed.ops, torch
from torch.distributed import TCPStore
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed()
host, _, port = os.environ["MEGATRON_WSD_STORE"].rpartition(":")
TCPStore(host, int(port), is_master=False).set(f"rank{rank}", "here")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
metrics = open(os.path.join(args.run_dir, f"island_{island}", "metrics.jsonl"), "a") if rank == 0 else None

def write(kind, **fields):
    if metrics:
        metrics.write(json.dumps({"kind": kind, "time": time.time(), **fields}) + "\\n")
        metrics.flush()

write("start", island=int(island), step=0, outer_step=0, parameters=8, unigram_entropy={}, resumed=False)
step = 0
while step < int(args.steps):
    stop = torch.tensor([len(asked)])
    torch.distributed.all_reduce(stop)
    if stop.item():
        write("event", step=step, event="stop", message="saved")
        break
    time.sleep(0.1)
    step += 1
    write("step", step=step, loss=5 - step / 100, lr=1e-3, phase="stable", tokens=step, tokens_per_s=1.0)
    if step % 5 == 0:
        write("round", step=step, outer_step=step // 5, committed=True, islands=[0, 1],
              contributors=[0, 1], island_bytes=64)
else:
    write("event", step=step, event="finish", message="done")
if rank == 0:
    print(f"megatron-wsd: ended at step {step}", flush=True)
os._exit(0)  # gloo's threads may abort an interpreter that ends by itself
"""


class Launch:
    """One running ``megatron-wsd launch`` of the trainer above."""

    def __init__(self, folder: Path, ranks: int, steps: int, dies: str = "") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(TRAINER)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        (folder / "config.json").write_text(json.dumps(config))
        self.run_dir = folder / "run"
        self.output = folder / "output.txt"
        command = [sys.executable, "-m", "megatron_wsd", "launch", "--islands", "2", "--ranks", str(ranks)]
        command += ["--config", str(folder / "config.json"), "--run-dir", str(self.run_dir)]
        command += ["--script", str(folder / "train.py"), "--steps", str(steps)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "TEST_DIES": dies, "COLUMNS": "200"}
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self.output.read_text()

    def records(self, island: int) -> list[dict[str, object]]:
        file = self.run_dir / f"island_{island}" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def left_behind(self) -> list[str]:
        """Processes of this run that are alive: all but the lighthouse name the run folder."""
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if str(self.run_dir) in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(line)
            except psutil.Error:
                continue
        return found

    def lighthouse_answers(self) -> bool:
        address = json.loads((self.run_dir / "run.json").read_text())["lighthouse"]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.1)


@contextmanager
def launched(folder: Path, **options: object) -> Iterator[Launch]:
    launch = Launch(folder, **options)  # type: ignore[arg-type]
    try:
        yield launch
    finally:
        launch.process.kill()
        launch.process.wait()


def has_rounds(launch: Launch, island: int) -> bool:
    return any(record["kind"] == "round" for record in launch.records(island))


@pytest.mark.launch
def test_a_rank_that_dies_in_set_up_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with launched(tmp_path / "with space", ranks=2, steps=10_000, dies="1.1") as launch:
        assert launch.process.wait(timeout=180) == 1, launch.text()
        text = launch.text()
        assert "island 1 failed (exit code 2)" in text
        assert "  | data.corpora.broad: no such file" in text
        assert "island 0 failed" not in text
        assert str(launch.run_dir / "island_1" / "log.txt") in text
        assert not any(record["kind"] == "step" for record in launch.records(1))
        wait_for(lambda: not launch.left_behind(), 5, "no process is left")
        assert not launch.lighthouse_answers()


@pytest.mark.launch
def test_ctrl_c_lets_the_islands_save(tmp_path: Path) -> None:
    with launched(tmp_path, ranks=1, steps=10_000) as launch:
        wait_for(lambda: has_rounds(launch, 0) and has_rounds(launch, 1), 180, "rounds")
        os.killpg(launch.process.pid, signal.SIGINT)  # as a terminal does
        assert launch.process.wait(timeout=60) == 0, launch.text()
        for island in (0, 1):
            assert launch.records(island)[-1]["event"] == "stop"
        assert "stopped and saved" in launch.text()
        assert (launch.run_dir / "run.png").stat().st_size > 10_000
        assert json.loads((launch.run_dir / "summary.json").read_text())["islands"][1]["end"] == "stop"
        wait_for(lambda: not launch.left_behind(), 5, "no process is left")
        assert not launch.lighthouse_answers()


@pytest.mark.launch
def test_ctrl_c_before_there_is_anything_to_save(tmp_path: Path) -> None:
    with launched(tmp_path, ranks=1, steps=10_000) as launch:
        wait_for(lambda: "lighthouse" in launch.text(), 60, "the islands are started")
        os.killpg(launch.process.pid, signal.SIGINT)
        assert launch.process.wait(timeout=60) == 130, launch.text()
        assert not has_rounds(launch, 0)
        wait_for(lambda: not launch.left_behind(), 5, "no process is left")


@pytest.mark.launch
@pytest.mark.parametrize(("script", "status"), [("os.kill(os.getpid(), 9)", 137), ("time.sleep(300)", 143)])
def test_the_exit_code_of_an_island_is_that_of_the_signal_that_ended_it(
    tmp_path: Path, script: str, status: int
) -> None:
    began = tmp_path / "began"
    (tmp_path / "train.py").write_text(f"import os, time; open({str(began)!r}, 'w').close(); {script}")
    (tmp_path / "config.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with socket.create_server(("127.0.0.1", 0)) as lighthouse:
        flags = ["--island", "0", "--islands", "1", "--ranks", "1", "--config", str(tmp_path / "config.json")]
        flags += ["--lighthouse", f"http://127.0.0.1:{lighthouse.getsockname()[1]}"]
        flags += ["--run-dir", str(tmp_path / "run"), "--script", str(tmp_path / "train.py")]
        command = [sys.executable, "-m", "megatron_wsd", "island", *flags]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            wait_for(began.exists, 120, "the rank is started")
            if status == 143:
                process.terminate()
            assert process.wait(timeout=60) == status
        finally:
            process.kill()


@pytest.mark.launch
def test_one_island_goes_on_without_the_other_and_the_exit_code_tells(tmp_path: Path) -> None:
    with launched(tmp_path, ranks=1, steps=150) as launch:
        wait_for(lambda: has_rounds(launch, 0) and has_rounds(launch, 1), 180, "rounds")
        supervisor = psutil.Process(int((launch.run_dir / "island_1" / "lock").read_text().split()[0]))
        below = supervisor.children(recursive=True)
        assert len(below) >= 3  # deepspeed's runner, its launcher and a rank, and the guard
        supervisor.kill()  # it alone: all below it must follow
        assert not psutil.wait_procs(below, timeout=10)[1]
        wait_for(lambda: "going on with island 0" in launch.text(), 20, "the other island is told to go on")
        assert launch.process.wait(timeout=120) == 1
        assert launch.records(0)[-1]["event"] == "finish"
        assert "island 1 failed (killed by SIGKILL)" in launch.text()
        assert "--island 1 --islands 2" in launch.text()  # how to bring it back
        wait_for(lambda: not launch.left_behind(), 5, "no process is left")


def test_a_guarded_command_and_its_children_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import time; from megatron_wsd.cli.process import Guarded\n"
        "child = Guarded(['/bin/sh', '-c', 'sleep 300 & sleep 300']); print(child.pid, flush=True)\n"
        "time.sleep(300)"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    leader = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: len(leader.children()) == 3, 10, "two sleepers and the guard")
    family = [leader, *leader.children(recursive=True)]
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(family, timeout=10)[1]


# An island without ranks: it tells of a round and holds its lock until it is asked to end; island 1 fails.
ISLAND = """
import json, os, signal, sys, time
from pathlib import Path
from megatron_wsd.rundir import held
folder, fails, elsewhere = Path(sys.argv[1]), "fails" in sys.argv, "elsewhere" in sys.argv
folder.mkdir(exist_ok=True)
with held(folder / "lock", "test"):
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "round"}) + "\\n")
    if elsewhere:
        (folder / "lock").write_text("0")  # what is a process on one machine is none on another
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while not fails:
        time.sleep(0.05)
sys.exit(1)
"""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stop_reaches_an_island_that_was_started_again_by_hand(
    tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(tmp_path / "run", load_config(TINY, islands=2, ranks=1), resume=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def program(island: int, *words: str) -> list[str]:
        return [sys.executable, "-c", ISLAND, str(run.island(island)), *words]

    def own_command(plan: Island) -> list[str]:
        return program(plan.island, *["fails"] * (plan.island == 1 and not plan.resume))

    monkeypatch.setattr(Island, "own_command", own_command)
    stop = SimpleNamespace(count=0, signal=signal.SIGINT)
    watch = _Watch(load_config(run.config_json), run, stop)  # type: ignore[arg-type]
    plans = [
        Island(island=i, islands=2, ranks=1, lighthouse="http://127.0.0.1:9", run_dir=run.path)
        for i in (0, 1)
    ]
    lighthouse = SimpleNamespace(alive=lambda: True)
    thread = threading.Thread(target=watch.until_the_end, args=(lighthouse,), daemon=True)
    watch.begin(plans)
    by_hand = None
    try:
        thread.start()
        wait_for(lambda: 1 in watch.failed, 60, "island 1 has failed")
        by_hand = subprocess.Popen(program(1, *["elsewhere"] * elsewhere))
        wait_for(lambda: is_held(run.island(1) / "lock"), 60, "it is back")
        stop.count = 1
        thread.join(60)
        assert not thread.is_alive() and watch.failed == {1: 1} and not watch.cut_short
        text = capsys.readouterr().out
        if elsewhere:
            assert by_hand.poll() is None
            assert "island 1 was started by hand and is left running (on another machine)" in text
            assert "kill -TERM of its `megatron-wsd island` or island.sh" in text
        else:
            assert by_hand.wait(0) == 0 and "left running" not in text
    finally:
        watch.kill()
        if by_hand is not None:
            by_hand.kill()
            by_hand.wait()
