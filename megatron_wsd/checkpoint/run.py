"""One checkpoint of one island: engine, outer state, schedule, data position, random states.

Which one an island begins from is decided in `megatron_wsd.resume`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from megatron_wsd import __version__
from megatron_wsd.checkpoint.outer import agreed, rank_file
from megatron_wsd.checkpoint.standing import Standing
from megatron_wsd.checkpoint.store import MANIFEST, OUTER_MANIFEST, CheckpointStore
from megatron_wsd.checkpoint.whole import crc_of, first_damage
from megatron_wsd.config import Config
from megatron_wsd.errors import CheckpointError, DamagedError, MegatronWSDError
from megatron_wsd.files import replace_file
from megatron_wsd.lineage import before_decay, pinned_steps
from megatron_wsd.rundir import RunDir

if TYPE_CHECKING:
    from megatron_wsd.data.consumption import Ledger
    from megatron_wsd.data.sampler import MixSampler
    from megatron_wsd.diloco.loop import OuterLoop

_ENGINE_TAG = "state"
_ENGINE = f"engine/{_ENGINE_TAG}"


def stable_steps(run: RunDir, island: int, config: Config) -> set[int]:
    """Steps of the checkpoints that a branch could begin from once a decay has begun.

    The newest of the stable phase, as `branch` judges it, and the newest such that all islands have whose
    folders are here. They are kept however many a decay writes after them.
    """
    store = CheckpointStore(run.island(island) / "checkpoints", 2)
    mine = []
    for step in store.steps():
        with suppress(MegatronWSDError):  # one that cannot be read is none
            standing = Standing.read(store.folder(step), config)
            if before_decay(standing.plan.schedule, standing.position):
                mine.append(step)
    roots = [root for root in run.path.glob("island_*/checkpoints") if root != store.root]
    common = set(mine).intersection(*(CheckpointStore(root, 2).steps() for root in roots))
    return {*mine[-1:], *[step for step in mine if step in common][-1:]}


class RunCheckpoints:
    """Saves and loads the checkpoints of this island; every method is collective unless it says otherwise.

    Args:
        root: ``RUN/island_<i>/checkpoints``.
        config: of the run; its digest goes into every manifest.
        inner: whose inner optimizer it is, see `megatron_wsd.inner.Choice.family`; goes there too.
    """

    def __init__(self, root: Path, config: Config, inner: str | None = None) -> None:
        run, island = RunDir(root.parents[1]), int(root.parent.name.removeprefix("island_"))
        self.store = CheckpointStore(
            root,
            config.checkpoint.keep,
            lambda: pinned_steps(run, island) | stable_steps(run, island, config),
        )
        self._config, self._inner = config, inner
        self._era = len(run.eras()) - 1 if run.run_json.exists() else 0

    def save(self, engine: Any, outer: OuterLoop, sampler: MixSampler, ledger: Ledger, step: int) -> None:
        """Write everything aside, then give it its name.

        Raises:
            CheckpointError: it cannot be written; older checkpoints are untouched.
        """
        group, staging = outer.group, self.store.staging(step)
        first = group.rank == 0
        try:
            agreed(group, self.store.root, lambda: self.store.begin(step, _bytes(outer)) if first else None)
            # Has barriers of its own, so a rank that fails in it cannot ask the others: it ends, and the
            # deepspeed launcher ends them.
            _save_engine(engine, staging)
            outer.save(staging / "outer")
            agreed(group, staging, lambda: _save_random(staging, group.rank))
            sums: list[int] = []
            names = _own_files(group.rank)
            agreed(group, staging, lambda: sums.extend(crc_of(staging / name) for name in names))
            each = enumerate(group.gather(sums))
            crcs = {n: f"{c:08x}" for rank, row in each for n, c in zip(_own_files(rank), row, strict=True)}
            content = {
                "version": __version__,
                "config": self._config.digest(),
                "ranks": group.size,
                "inner": self._inner,
                "inner_step": outer.inner_step,
                "schedule": engine.lr_scheduler.state_dict(),
                "sampler": sampler.state_dict(),
                "consumed": ledger.state_dict(),
                "era": self._era,
            }

            def complete() -> None:
                # As they were when the outer state was written: a round may have been committed since.
                told = json.loads((staging / OUTER_MANIFEST).read_text())
                crcs[OUTER_MANIFEST] = f"{crc_of(staging / OUTER_MANIFEST):08x}"
                facts = {"outer_step": told["counters"]["outer_step"], "tokens": told["extra"]["tokens"]}
                self.store.complete(step, {**content, **facts, "crc32": crcs})

            agreed(group, staging, lambda: complete() if first else None)
        except CheckpointError:
            if first:
                self.store.discard(step)
            raise

    def damage(self, folder: Path, rank: int, part: int, piece: int) -> DamagedError | None:
        """Read what this rank is going to load, and say what of it is damaged; for each rank alone.

        A rank loads its ``optim_states`` and its ``model_states``, and to see how many pieces there are also
        the ``model_states`` of piece 0 (DeepSpeed 0.19); its outer state and random states; both manifests.

        Args:
            folder: of a checkpoint that the store takes for complete.
            rank: in the island.
            part: which data parallel rank this is.
            piece: which tensor parallel rank.

        Raises:
            CheckpointError: it is of another implementation of the inner optimizer.
            OSError: a file cannot be read.
        """
        manifest = json.loads((folder / MANIFEST).read_text())
        self._refuse_another(folder, manifest)
        model = f"{_ENGINE}/zero_pp_rank_{part}_mp_rank_00_model_states.pt"
        own = f"{_ENGINE}/*zero_pp_rank_{part}_mp_rank_{piece:02d}_*.pt"
        files = [name for name in manifest["files"] if name == model or fnmatchcase(name, own)]
        return first_damage(folder, [*_own_files(rank), *files], manifest.get("crc32", {}))

    def _refuse_another(self, folder: Path, manifest: dict[str, Any]) -> None:
        wrote = manifest.get("inner")
        if None not in (wrote, self._inner) and wrote != self._inner:
            raise CheckpointError(
                str(folder),
                f"the state of the inner optimizer of this run, {self._inner}",
                f"that of {wrote}",
                'Name the one that wrote it in megatron_wsd.inner; "deepspeed_cpu" there is "deepspeed".',
            )

    def load_engine(self, engine: Any, folder: Path) -> None:
        """Weights, inner optimizer and schedule.

        Raises:
            CheckpointError: it is of another model, or of another implementation of the inner optimizer.
        """
        manifest = json.loads((folder / MANIFEST).read_text())
        self._refuse_another(folder, manifest)
        try:
            # The schedule comes from the manifest: the config's digest says that it is of this run, and what
            # was decided and overridden meanwhile is part of it.
            path, _ = engine.load_checkpoint(
                str(folder / "engine"), tag=_ENGINE_TAG, load_lr_scheduler_states=False
            )
        except (RuntimeError, KeyError, ValueError, AssertionError, EOFError, UnpicklingError) as e:
            raise CheckpointError(
                str(folder),
                "a checkpoint of this model and number of ranks",
                f"one that DeepSpeed cannot load: {str(e).splitlines()[0] if str(e) else type(e).__name__}",
                "Resume with the config of the run.",
            ) from e
        if path is None:
            raise CheckpointError(str(folder / "engine"), "DeepSpeed's files", "none that it can load")
        engine.lr_scheduler.restore(manifest["schedule"])

    def consumed(self, folder: Path) -> dict[str, Any] | None:
        """What the island had committed, as `Ledger.state_dict` gave it; for each rank alone."""
        found: dict[str, Any] | None = json.loads((folder / MANIFEST).read_text()).get("consumed")
        return found

    def load_rest(self, outer: OuterLoop, folder: Path) -> None:
        """Outer state and random states.

        Raises:
            CheckpointError: torn, damaged or of something else.
        """
        outer.load(folder / "outer")
        agreed(outer.group, folder, lambda: _load_random(folder, outer.group.rank))


def _bytes(outer: OuterLoop) -> int:
    """About what a checkpoint takes: fp32 masters and two moments, weights, and the outer state."""
    shard = sum(f.anchor.numel() for f in outer.state.fragments)
    own = shard * 16 + sum(t.numel() * t.element_size() for t in outer.state.tensors().values())
    return int(1.05 * own * outer.group.size) + (1 << 20)


def _save_engine(engine: Any, staging: Path) -> None:
    try:
        engine.save_checkpoint(str(staging / "engine"), tag=_ENGINE_TAG)
    except (OSError, RuntimeError) as e:  # torch's zip writer raises RuntimeError when the disk is full
        raise CheckpointError(
            str(staging),
            "to write the engine's state",
            str(e).splitlines()[0],
            "Free space, then go on with --resume; complete checkpoints are untouched.",
        ) from e


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_rank{rank:05d}.safetensors"


def _own_files(rank: int) -> list[str]:
    """What a rank writes beside DeepSpeed's files."""
    return [f"outer/{rank_file(rank)}", _random_file(Path(), rank).name]


def _save_random(folder: Path, rank: int) -> None:
    """The states of torch's generators and of megatron-core's named ones; all are uint8 tensors."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import save_file

    states = {f"tracker.{name}": state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()}
    states["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    target = _random_file(folder, rank)
    save_file(states, str(target.with_suffix(".part")))
    replace_file(target.with_suffix(".part"), target)


def _load_random(folder: Path, rank: int) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from safetensors.torch import load_file

    states = load_file(str(_random_file(folder, rank)))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    named = {k.removeprefix("tracker."): v for k, v in states.items() if k.startswith("tracker.")}
    get_cuda_rng_tracker().set_states(named)
