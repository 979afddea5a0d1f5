"""DeepSpeed's monitors, TensorBoard, CSV, W&B and Comet, for a run of several islands."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

_MONITORED = ("step", "round", "eval", "adopt")


def monitors_of(config: dict[str, Any], run_dir: Path, island: int) -> dict[str, Any]:
    """DeepSpeed's json with monitors that keep the islands of a run apart.

    All islands read one json, and DeepSpeed's monitors know nothing of islands: TensorBoard and CSV get a
    folder for each (``RUN/island_I/NAME``, or ``island_I`` in the ``output_path`` that was given), and the
    runs of W&B the name of the run folder as their group, if no other is given. W&B takes the name of a run
    and the folder of its files from the environment: what is not set there becomes ``island_I`` and
    ``RUN/island_I``.

    Args:
        config: the json; not changed.
        run_dir: the run folder.
        island: number of this island.
    """
    changed = dict(config)
    for name in ("tensorboard", "csv_monitor"):
        monitor = config.get(name) or {}
        if monitor.get("enabled"):
            own = run_dir / f"island_{island}" / name
            if monitor.get("output_path"):
                own = Path(monitor["output_path"]) / f"island_{island}"
            changed[name] = {**monitor, "output_path": str(own)}
    wandb = config.get("wandb") or {}
    if wandb.get("enabled"):
        changed["wandb"] = {"group": run_dir.absolute().name, **wandb}
        os.environ.setdefault("WANDB_NAME", f"island_{island}")
        os.environ.setdefault("WANDB_DIR", str(run_dir / f"island_{island}"))
    return changed


class Monitors:
    """The numbers of a run's records, for whatever DeepSpeed's json has switched on.

    Args:
        master: ``engine.monitor``.
        batch: samples of one inner step of the island.
    """

    def __init__(self, master: Any, batch: int) -> None:
        self._each = [
            monitor
            for name in ("tb_monitor", "csv_monitor", "comet_monitor")
            if (monitor := getattr(master, name, None)) is not None
        ]
        self._wandb = getattr(master, "wandb_monitor", None)
        self._batch, self._samples = batch, 0

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Write the numbers of one record, by step of the run.

        W&B has one step for everything in a run, drops what comes with a smaller one than before, and gets
        DeepSpeed's own numbers by samples: so its step is samples, and the counts of steps stand beside.
        """
        if kind not in _MONITORED:
            return
        events = scalars(kind, fields)
        for monitor in self._each:
            monitor.write_events(events)
        if self._wandb is not None:
            step, position = int(fields["step"]), int(fields["position"])
            self._samples = max(self._samples, step * self._batch)
            events += [
                (f"megatron_wsd/{name}", float(n), n)
                for name, n in (("inner_step", step), ("position", position))
            ]
            self._wandb.write_events([(tag, number, self._samples) for tag, number, _ in events])


def finish_monitors(status: int, timeout_s: float = 60.0) -> None:
    """Send what W&B still holds: its own exit handler does not run when a rank ends itself at once.

    Args:
        status: of the process, which W&B shows as finished or failed.
        timeout_s: how long a W&B that cannot be reached may hold the rank up.
    """
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if wandb is None or run is None:
        return
    folder = Path(run.dir).parent
    sending = threading.Thread(target=wandb.finish, kwargs={"exit_code": status}, daemon=True)
    sending.start()
    sending.join(timeout_s)
    if sending.is_alive():
        print(f"W&B was not told everything within {timeout_s:g} s; wandb sync {folder}", file=sys.stderr)


def scalars(kind: str, fields: dict[str, Any]) -> list[tuple[str, float, int]]:
    """The numbers of a record as (tag, value, position), for a monitor.

    The position of the schedule is the step of the run, by which islands that count steps of their own can be
    compared.

    ``megatron_wsd/step/loss``, ``megatron_wsd/eval/anchor/CORPUS/loss``; of the islands of a round
    ``megatron_wsd/round/staleness/island_1``.
    """
    label = f"{fields['target']}/{fields['corpus']}/" if kind == "eval" else ""
    found: list[tuple[str, float, int]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            each = [(f"{name}/island_{key}", inner) for key, inner in value.items()]
        else:
            each = [(name, value)] if name not in ("step", "position") else []
        found += [
            (f"megatron_wsd/{kind}/{label}{tag}", float(number), int(fields["position"]))
            for tag, number in each
            if isinstance(number, (int, float))
        ]
    return found
