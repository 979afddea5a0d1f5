"""One one-rank island without DeepSpeed: the whole outer loop and real torchft on plain tensors.

The model is a handful of tensors that are drawn to a target of each island's own, so that islands disagree
and all is a pure function of (island, inner step): nothing here learns, and every number can be checked.

Beside the metrics of the run it leaves ``trace.jsonl``: a line when it has met the others, and one a commit
with all counters after it, written by the outer half at that very moment, so that what a process did is known
when it dies in the next one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RUST_LOG", "warn")

import torch
import torch.distributed as dist
import torchft  # noqa: F401  # here, so that a process which is forked from this module has it

from megatron_wsd.config import parse_config
from megatron_wsd.diloco import outer_loop
from megatron_wsd.diloco import round as round_module
from megatron_wsd.diloco.faults import VARIABLE, parse_faults
from megatron_wsd.diloco.island import IslandAddress
from megatron_wsd.diloco.local import Local
from megatron_wsd.diloco.loop import Decoupled, Lockstep, OuterLoop
from megatron_wsd.diloco.membership import Membership
from megatron_wsd.diloco.residence import Residence
from megatron_wsd.errors import MegatronWSDError
from megatron_wsd.shards.zero3 import Shard

SHAPES = {
    "embedding.weight": (40, 8),
    "layers.0.weight": (70, 64),
    "layers.0.bias": (7,),
    "layers.1.weight": (64, 65),
    "layers.2.weight": (257,),
    "final.weight": (1,),
}


class PlainShards:
    """Tensors in the place of an engine's shards."""

    def __init__(self, seed: int, without: str = "", device: str = "cpu") -> None:
        g = torch.Generator().manual_seed(seed)
        shapes = {name: shape for name, shape in SHAPES.items() if name != without}
        drawn = [torch.randn(torch.Size(shape), generator=g).view(-1) for shape in shapes.values()]
        self.values = [value.to(device) for value in drawn]
        self.shards = [
            Shard(name, shape, 0, v.numel())
            for (name, shape), v in zip(shapes.items(), self.values, strict=True)
        ]

    def read(self, out: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for i, target in zip(range(len(self.values)) if members is None else members, out, strict=True):
            target.copy_(self.values[i])

    def write(self, values: Sequence[torch.Tensor], members: Sequence[int] | None = None) -> None:
        for i, value in zip(range(len(self.values)) if members is None else members, values, strict=True):
            self.values[i].copy_(value)


class PlainEngine:
    """What the outer loop needs of an engine.

    Args:
        shards: that it trains.
        island: number of the island.
        busy_cycles: for which the training stream of a GPU does something else before each step.
    """

    def __init__(self, shards: PlainShards, island: int, busy_cycles: int = 0) -> None:
        self._busy_cycles = busy_cycles
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._shards, self._island = shards, island

    def train_batch_size(self) -> int:
        return 4

    def gradient_accumulation_steps(self) -> int:
        return 1

    def train(self) -> None:
        """One inner step: a pull towards this island's target, and noise of this step."""
        g = torch.Generator().manual_seed(1_000_003 * self._island + self.global_steps)
        if self._busy_cycles:
            torch.cuda._sleep(self._busy_cycles)
        for i, value in enumerate(self._shards.values):
            target = float(self._island) - 1.0
            noise = torch.randn(value.shape, generator=g).to(value.device)
            value.add_(0.02 * (target - value) + 0.01 * noise).add_(i * 0.0)
        self.global_steps += 1


def live_elsewhere(job: dict[str, Any]) -> None:
    """Let the outer half live where the job says: messages over the host's memory, CUDA's kernels beneath."""
    if job.get("staged") or job.get("emulated"):
        there = Residence(torch.device("cpu"), staged=True)
        outer_loop.residence_of = lambda config: there
    if job.get("emulated"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "numerics" / "cuda_on_cpu"))
        import emulated

        emulated.send_everything(emulated.load(Path(job["emulated"])))


def watch_messages() -> set[int]:
    """Where the memory begins in which payloads are when they are sent or received."""
    plain, found = Membership.broadcast, set()

    def watched(seat: Membership, tensor: torch.Tensor, source: int) -> None:
        if tensor.dtype == torch.uint8:
            found.add(tensor.untyped_storage().data_ptr())
        plain(seat, tensor, source)

    Membership.broadcast = watched  # type: ignore[method-assign]
    return found


def build(job: dict[str, Any]) -> tuple[OuterLoop, PlainEngine, PlainShards]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = job.get("device", "cpu")
    job["config"]["megatron_wsd"]["outer"]["device"] = device
    config = parse_config(job["config"], islands=job["islands"], ranks=1)
    address = IslandAddress(
        job["island"], job["islands"], job["lighthouse"], ("localhost", store.port), Path(job["run_dir"])
    )
    shards = PlainShards(job.get("weight_seed", 0), job.get("without", ""), job.get("shards", device))
    engine = PlainEngine(shards, job["island"], job.get("busy_cycles", 0))
    kind = Lockstep if config.sync.mode == "sync" else Decoupled
    loop = kind(engine, config, address, 0, shards)
    loop.store = store  # type: ignore[attr-defined]  # must outlive the manager
    return loop, engine, shards


class Trace:
    """Lets every outer step of this process leave a line in ``path``.

    Attributes:
        fed_back: fragment and cursor of every contribution whose rounding error was taken into account.
    """

    def __init__(self, path: Path, island: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  # until the process ends
        self._island = island
        self.fed_back: list[tuple[int, int]] = []
        self._watch_steps()
        self._watch_feedback()

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "time": time.time(), "pid": os.getpid(), "island": self._island, **fields}
        self._file.write(json.dumps(line) + "\n")

    def _watch_steps(self) -> None:
        plain = round_module.step_fragment

        def traced(config: Any, schedule: Any, state: Any, decision: Any, merged: Any) -> None:
            plain(config, schedule, state, decision, merged)
            offers = {i: decision.offer(i) for i in decision.contributors}
            self.write(
                "commit",
                outer_step=state.outer_step,
                fragment=decision.fragment,
                islands=decision.islands,
                offers={i: [o.base, o.cursor, o.steps, o.tokens] for i, o in offers.items()},
                **counters(state),
            )

        round_module.step_fragment = traced

    def _watch_feedback(self) -> None:
        plain = Local.committed

        def traced(local: Local, contribution: Any) -> None:
            if not contribution.counted:
                self.fed_back.append((contribution.fragment, contribution.cursor))
            plain(local, contribution)

        Local.committed = traced  # type: ignore[method-assign]

    def note_life(self, loop: OuterLoop, loaded: list[int | None]) -> None:
        """The island has met the others; ``loaded`` says what of its own it knew to be committed before."""
        taken = [f.taken.get(loop.island) for f in loop.state.fragments]
        errors = [0.0 if f.error is None else float(f.error.abs().max()) for f in loop._local.fragments]
        moved = [a != b for a, b in zip(taken, loaded, strict=True)]
        self.write("life", outer_step=loop.outer_step, moved=moved, errors=errors)


def counters(state: Any) -> dict[str, Any]:
    return {
        "versions": [f.version for f in state.fragments],
        "taken": [dict(sorted(f.taken.items())) for f in state.fragments],
        "fragment_tokens": [f.tokens for f in state.fragments],
        "fragment_steps": [f.steps for f in state.fragments],
    }


def arm(loop: OuterLoop, path: Path) -> None:
    """Take over faults that were asked for while the process runs."""
    if path.exists():
        loop.faults._left.extend(parse_faults(path.read_text()))
        path.unlink()


def resume(loop: OuterLoop, engine: PlainEngine, shards: PlainShards, folder: Path) -> bool:
    """The outer state alone: what was local is given up, as for an island whose engine is lost."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        return False
    engine.global_steps = json.loads(manifest.read_text())["extra"]["inner_step"]
    loop.load(folder)
    return True


def run(job: dict[str, Any]) -> dict[str, Any]:
    home = Path(job["run_dir"]) / f"island_{job['island']}"
    folder = home / "checkpoint"
    trace = Trace(home / "trace.jsonl", job["island"])
    live_elsewhere(job)
    messages_at = watch_messages()
    loop, engine, shards = build(job)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    loop.stop_requested = lambda: bool(asked)
    resumed = bool(job.get("resume")) and resume(loop, engine, shards, folder)
    loaded = [f.taken.get(loop.island) for f in loop.state.fragments]
    loop.meet()
    trace.note_life(loop, loaded)
    met_at = loop.outer_step
    began, trained, longest = time.monotonic(), 0, 0.0
    while loop.position < until(job) and not asked:
        arm(loop, home / "faults")
        engine.train()
        time.sleep(job.get("step_s", 0.02))
        before = time.monotonic()
        loop.step(tokens=100)
        longest = max(longest, time.monotonic() - before)
        trained += 1
        if job.get("save_every") and trained % job["save_every"] == 0:
            loop.save(folder)
    seconds = time.monotonic() - began
    if asked:
        loop.save(folder)
    else:
        loop.finish()
    result = {
        "stopped": bool(asked),
        "met_at": met_at,
        "fed_back": trace.fed_back,
        "resumed": resumed,
        "outer_step": loop.outer_step,
        **counters(loop.state),
        "inner_step": loop.inner_step,
        "position": loop.position,
        "tokens": loop.tokens,
        "digest": loop.state.digest(),
        "holds_anchor": all(
            torch.equal(v.to(shards.values[i].device), shards.values[i])
            for f, own in zip(loop.state.fragments, loop._local.fragments, strict=True)
            for v, i in zip(f.layout.views(f.anchor.float()), own.members, strict=True)
        ),
        "trained": trained,
        "seconds": seconds,
        "longest_pause_s": longest,
        "message_rooms": len(messages_at),
    }
    loop.close()
    return result


def until(job: dict[str, Any]) -> int:
    """The position at which the run is over; the file ``stop`` brings it forward while it runs."""
    stop = Path(job["run_dir"], "stop")
    return int(stop.read_text()) if stop.exists() else int(job["until"])


def work(job: dict[str, Any]) -> None:
    """The life of one island, to the end of the process; what it found is in the file ``job["out"]``."""
    torch.set_num_threads(1)
    signal.alarm(job.get("limit_s", 580))  # nobody is left behind if the test itself is killed
    try:
        result = run(job)
    except MegatronWSDError as e:
        traceback.print_exc()
        result = {"error": type(e).__name__, "text": str(e)}
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    out = Path(job["out"])
    out.with_suffix(".part").write_text(json.dumps(result))
    out.with_suffix(".part").replace(out)
    os._exit(0)


def forked(job: dict[str, Any], faults: str, log: str) -> None:
    """`work` in a process that was forked after all imports, which are most of what a start costs."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ[VARIABLE] = faults
    work(job)
