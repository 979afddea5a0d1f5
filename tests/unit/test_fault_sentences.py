"""Faults on request: how they are said, and that they happen once, to whom they should."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

import pytest
import torch

from megatron_wsd.diloco import faults as module
from megatron_wsd.diloco.faults import (
    KINDS,
    NAN_POINTS,
    NO_FAULTS,
    POINTS,
    Fault,
    Faults,
    InjectedFault,
    fail,
    join_faults,
    parse_faults,
)
from megatron_wsd.errors import ConfigError


@pytest.mark.parametrize("at", POINTS)
@pytest.mark.parametrize("how", KINDS)
def test_every_fault_can_be_said_and_read_back(at: str, how: str) -> None:
    if how == "nan" and at not in NAN_POINTS:
        with pytest.raises(ConfigError, match="how=nan: expected at=capture, where there is a tensor"):
            fail(island=1, at=at, round=3, how=how)
        return
    fault = fail(island=1, at=at, round=3, how=how, rank=2)
    assert Fault.parse(str(fault)) == fault


def test_sentences() -> None:
    fault = Fault.parse("island=1 at=exchange round=3 how=kill")
    assert fault == fail(island=1, at="within_exchange", round=3, how="kill")
    assert str(fault) == "island=1 at=within_exchange round=3 how=kill"
    slow = fail(island=0, at="adopt", round=1, how="slow")
    assert slow.seconds == 3.0 and str(slow).endswith("how=slow seconds=3")
    text = "island=0 at=adopt round=1 how=slow seconds=0.5 rank=1;how=hang at=step island=2 round=0; "
    both = parse_faults(text)
    assert [f.seconds for f in both] == [0.5, None] and parse_faults(join_faults(both)) == both
    assert parse_faults(" ; ") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("island=1 at=exchang round=3 how=kill", r"--inject at: .*got 'exchang'. Did you mean 'exchange'\?"),
        ("island=1 at=commit round=3 how=kil", r"--inject how: .*got 'kil'. Did you mean 'kill'\?"),
        ("iland=1 at=commit round=3 how=kill", r"--inject: .*got 'iland'. Did you mean 'island'\?"),
        ("island=one at=commit round=3 how=kill", "--inject island: expected a number, got one"),
        ("island=-1 at=commit round=3 how=kill", "--inject island: expected at least 0, got -1"),
        ("island=1 at=commit how=kill", "without round"),
        ("", "without island, at, round, how"),
        ("island=1 island=2 at=commit round=3 how=kill", "island=VALUE once"),
        ("island at=commit round=3 how=kill", "island=VALUE once"),
        ("island=1 at=commit round=3 how=kill seconds=3", "--inject seconds: expected how=slow with it"),
        ("island=1 at=commit round=3 how=slow seconds=0", "--inject seconds: expected .* above 0"),
        ("island=1 at=commit round=3 how=slow seconds=nan", "--inject seconds: expected .* above 0"),
    ],
)
def test_sentences_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Fault.parse(text)


def test_nothing_happens_without_the_variable() -> None:
    assert Faults.from_environ(0, 0, {}) is NO_FAULTS
    tensor = torch.ones(3)
    for point in POINTS:
        NO_FAULTS.here(point, 3, tensor)
    assert bool((tensor == 1).all())


def test_an_exception_happens_once_and_only_where_it_was_asked_for() -> None:
    text = "island=1 at=commit round=3 how=exception rank=0"
    for island, rank in ((0, 0), (1, 1)):
        Faults.from_environ(island, rank, {"MEGATRON_WSD_INJECT": text}).here("commit", 3)
    faults = Faults.from_environ(1, 0, {"MEGATRON_WSD_INJECT": text})
    faults.here("commit", 2)
    faults.here("step", 3)
    with pytest.raises(InjectedFault, match="island=1 at=commit round=3 how=exception rank=0"):
        faults.here("commit", 3)
    faults.here("commit", 3)


def test_a_point_that_is_not_passed_in_its_round_fails_in_the_next() -> None:
    faults = Faults([fail(island=0, at="healing", round=3, how="exception")])
    faults.here("healing", 2)
    with pytest.raises(InjectedFault):
        faults.here("healing", 5)


def test_nan_spoils_the_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    faults = Faults([fail(island=0, at="capture", round=1, how="nan")], island=0, rank=1)
    tensor = torch.ones(2, 3)
    before = tensor._version
    faults.here("capture", 1, tensor)
    assert torch.isnan(tensor).sum() == 1 and torch.isnan(tensor[0, 0])
    assert tensor._version > before
    said = capsys.readouterr().out
    assert said == "megatron-wsd: injected on rank 1, round 1: island=0 at=capture round=1 how=nan\n"
    Faults([fail(island=0, at="capture", round=1, how="nan")]).here("capture", 1, torch.ones(0))


def test_slow_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    faults = Faults(parse_faults("island=0 at=agree round=0 how=slow seconds=7"))
    faults.here("agree", 0)
    faults.here("agree", 1)
    assert slept == [7.0]


def test_hang_stops_the_thread_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, woken = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if hung.is_set():
            woken.wait()
            raise InterruptedError  # only so that the test can end
        hung.set()

    monkeypatch.setattr(module.time, "sleep", sleep)
    faults = Faults([fail(island=0, at="step", round=0, how="hang")])

    def pass_by() -> None:
        with contextlib.suppress(InterruptedError):
            faults.here("step", 0)

    thread = threading.Thread(target=pass_by)
    thread.start()
    assert hung.wait(30)
    faults.here("step", 0)  # this thread goes on
    assert thread.is_alive()
    woken.set()
    thread.join(30)
    assert not thread.is_alive()


def test_kill_is_a_kill() -> None:
    code = (
        "from megatron_wsd.diloco.faults import Faults\n"
        "import sys\n"
        "faults = Faults.from_environ(1, 0)\n"
        "try:\n"
        "    faults.here('within_exchange', 3)\n"
        "finally:\n"
        "    print('still here')\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = {"MEGATRON_WSD_INJECT": "island=1 at=exchange round=3 how=kill", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert "injected on rank 0, round 3" in done.stdout and "still here" not in done.stdout
    other = {**env, "MEGATRON_WSD_INJECT": env["MEGATRON_WSD_INJECT"].replace("island=1", "island=0")}
    done = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "still here\n", done.stderr
