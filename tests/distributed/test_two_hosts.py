"""Islands with addresses of their own, and a link between them that is cut and healed.

The whole outer loop and real torchft, as in `test_rounds`, in a network of which `two_hosts` tells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_matrix import Tail, check, replace_text
from loop_runner import HEARTBEAT_S, config
from two_hosts import HUB, WAN, Island, Network, NoNamespacesError, address, launcher, network, running

from megatron_wsd.cli.lighthouse import lighthouse_command
from megatron_wsd.config import parse_config

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0  # of the test, on a machine that does other things as well
RESTART_S = 1.0
PORT = 29510


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(network(2))
        except NoNamespacesError as e:
            pytest.skip(f"this machine allows no network namespaces with a bridge: {e}")
        timeouts = parse_config(config("async"), islands=2, ranks=1).islands
        log = tmp_path_factory.mktemp("lighthouse") / "log"
        stack.enter_context(running(made.hub, lighthouse_command(timeouts, f"{HUB}:{PORT}"), log))
        yield made


class Run:
    """Two islands on two hosts.

    The ranks of island 1 were launched from the hub: its store has another address than they have.
    """

    def __init__(self, stack: ExitStack, net: Network, run_dir: Path, raw: dict[str, Any]) -> None:
        self.net, self.run_dir, self._raw = net, run_dir, raw
        self._store = stack.enter_context(launcher(net.hub, HUB))
        self.traces = [Tail(run_dir / f"island_{i}" / "trace.jsonl") for i in (0, 1)]
        self._records = [Tail(run_dir / f"island_{i}" / "metrics.jsonl") for i in (0, 1)]
        self._starts = 0
        self.islands: list[Island] = []
        for i in (0, 1):
            self.islands.append(self.start(i))
            stack.callback(lambda i=i: self.islands[i].kill())

    def start(self, island: int) -> Island:
        self._starts += 1
        job = {
            "island": island,
            "islands": 2,
            "lighthouse": f"http://{HUB}:{PORT}",
            "store": self._store if island == 1 else None,
            "config": self._raw,
            "run_dir": str(self.run_dir),
            "until": 10**9,
            "step_s": 0.02,
            "out": str(self.run_dir / f"out_{self._starts}.json"),
        }
        return Island(self.net.hosts[island], job)

    def rounds(self, island: int) -> list[dict[str, Any]]:
        return [r for r in self._records[island].poll() if r["kind"] == "round"]

    def commits(self, island: int, here: list[int]) -> int:
        """How many rounds the island has committed in this company."""
        return sum(r["committed"] and r["islands"] == here for r in self.rounds(island))

    def voids(self, island: int) -> int:
        return sum(
            not r["committed"] and r["reason"] not in ("", "nothing to merge") for r in self.rounds(island)
        )

    def outer_step(self, island: int) -> int:
        return max(
            (line["outer_step"] for line in self.traces[island].poll() if line["kind"] == "commit"), default=0
        )

    def until(self, what: str, reached: Callable[[], bool], mortal: tuple[int, ...] = ()) -> None:
        """Wait; no island but the mortal may end meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while not reached():
            ended = [i for i in (0, 1) if i not in mortal and self.islands[i].poll() is not None]
            if ended or time.monotonic() > end:
                logs = [island.log.read_text(errors="replace")[-3000:] for island in self.islands]
                raise AssertionError(
                    f"waiting for {what}, ended: {ended}, rounds {[self.rounds(i)[-2:] for i in (0, 1)]}\n"
                    + "\n---- the other island ----\n".join(logs)
                )
            time.sleep(0.05)

    def together(self, what: str) -> None:
        """Wait until both commit rounds in which both take part."""
        before = [self.commits(i, [0, 1]) for i in (0, 1)]
        self.until(
            f"both to commit {what}", lambda: all(self.commits(i, [0, 1]) > before[i] + 3 for i in (0, 1))
        )

    def steps_grow(self, island: int) -> None:
        """Wait until the island has trained more than two sync points further."""
        before = self.islands[island].steps()
        name = f"island {island} to train on"
        self.until(
            name,
            lambda: (
                self.islands[island].steps() > before + 2 * self._raw["megatron_wsd"]["sync"]["inner_steps"]
            ),
        )

    def finish(self) -> list[dict[str, Any]]:
        """End the run, and check that it is one history of which nothing is lost."""
        # In synchronous mode all must stop at one step, so at one that nobody has come to yet.
        sync = self._raw["megatron_wsd"]["sync"]["mode"] == "sync"
        newest = max(island.steps() for island in self.islands)
        replace_text(self.run_dir / "stop", str(newest + 60 if sync else 0))
        self.until("the end", lambda: all(i.out.exists() for i in self.islands), mortal=(0, 1))
        results = [json.loads(island.out.read_text()) for island in self.islands]
        check([t.poll() for t in self.traces], [r.poll() for r in self._records], results)
        return results


def listening(host: Any) -> set[str]:
    """Addresses at which anything listens there."""
    lines = host.sh("ss -Hltn").splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_link_that_is_cut_and_healed(net: Network, mode: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        raw = config(mode, timeout_s=2.0, fragments=2, wire="int8")
        run = Run(stack, net, tmp_path, raw)
        run.together("at first")
        # Nothing of it is open to another network than that between the islands.
        assert listening(net.hub) == {HUB}
        for i, host in enumerate(net.hosts):
            assert address(i) in listening(host) <= {address(i), "127.0.0.1"}

        # Island 1 reaches neither the other nor the lighthouse, which lets island 0 go on alone.
        net.cut(1)
        alone = run.commits(0, [0])
        run.until("island 0 to go on alone", lambda: run.commits(0, [0]) > alone + 3)
        behind = run.outer_step(1)
        if mode == "async":
            run.steps_grow(1)
        assert run.outer_step(1) == behind < run.outer_step(0)
        net.heal(1)
        run.together("after the cut")

        # Both reach the lighthouse, and not each other: nobody can tell who should go on, so nobody commits.
        net.part(True)
        voids = [run.voids(i) for i in (0, 1)]
        run.until("void rounds", lambda: all(run.voids(i) > voids[i] for i in (0, 1)))
        stands = [run.outer_step(i) for i in (0, 1)]
        if mode == "async":
            run.steps_grow(0)
            run.steps_grow(1)
        run.until("one more void round", lambda: all(run.voids(i) > voids[i] + 1 for i in (0, 1)))
        assert [run.outer_step(i) for i in (0, 1)] == stands
        net.part(False)
        run.together("after they were parted")

        net.restart_vpn(1, RESTART_S)
        run.together("after a restart of the VPN")
        results = run.finish()
        assert results[0]["digest"] == results[1]["digest"]


def test_a_cut_that_lasts_ends_the_island_without_lighthouse(net: Network, tmp_path: Path) -> None:
    with ExitStack() as stack:
        patience = {"join_timeout_s": 2.0, "heartbeat_timeout_s": HEARTBEAT_S}
        run = Run(stack, net, tmp_path, config("async", timeout_s=1.5, islands=patience))
        run.together("at first")
        net.cut(1)
        lost = run.islands[1]
        run.until("the end of island 1", lambda: lost.poll() is not None, mortal=(1,))
        told = json.loads(lost.out.read_text())
        assert told["error"] == "GaveUp" and "megatron_wsd.islands.join_timeout_s" in told["text"], told
        net.heal(1)
        run.islands[1] = run.start(1)
        run.together("after island 1 was started again")
        run.finish()


@pytest.mark.parametrize(
    ("flags", "inside"), [(["--interface", WAN, "--nccl-interface", "lo"], "lo"), ([], None)]
)
def test_a_dry_run_names_the_address_of_the_host(net: Network, flags: list[str], inside: str | None) -> None:
    line = [str(ROOT / "launch" / "island.sh"), "--island", "1", "--islands", "2", "--ranks", "2"]
    line += ["--lighthouse", f"http://{HUB}:{PORT}", "--config", str(ROOT / "launch/configs/tiny_cpu.json")]
    done = subprocess.run(
        net.hosts[1].command([*line, "--run-dir", "/nowhere/run", "--dry-run", *flags]),
        env={k: v for k, v in os.environ.items() if not k.endswith("SOCKET_IFNAME")},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    interface = f", interface {WAN}" if flags else ""
    assert f"#   this machine towards the islands: {address(1)}{interface}\n" in done.stdout
    assert "island 1 of 2: ranks 0-1 on host-1" in done.stdout
    said = dict(word.rstrip(" \\").split("=", 1) for word in done.stdout.splitlines() if word.endswith("\\"))
    assert said["MEGATRON_WSD_STORE"] == f"{address(1)}:STORE_PORT"
    assert said["MEGATRON_WSD_LIGHTHOUSE"] == f"http://{HUB}:{PORT}"
    assert said.get("MEGATRON_WSD_INTERFACE") == (WAN if flags else None)
    assert said.get("GLOO_SOCKET_IFNAME") == said.get("NCCL_SOCKET_IFNAME") == inside
