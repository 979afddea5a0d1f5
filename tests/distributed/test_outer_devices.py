"""Where the outer half lives changes no bit: on the CPU, over a staging buffer, and with CUDA's kernels.

There need be no GPU: the CUDA extension is built for the CPU, as in tests/numerics. What differs on a GPU is
that memory has to be copied and streams waited for; tests/gpu does that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from loop_runner import Islands, config, lighthouse

from megatron_wsd.diloco.faults import fail

UNTIL = 45

HOWS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fragments, int8": {"fragments": 2, "wire": "int8"},
    "bf16, Nesterov": {"wire": "bf16", "outer": {"optimizer": "nesterov", "lr": 0.4}},
    "radial, int4, bf16 anchor": {
        "merge": "radial",
        "wire": "int4",
        "fragments": 2,
        "outer": {"anchor_dtype": "bf16"},
    },
}


def run(
    folder: Path, raw: dict[str, Any], *jobs: dict[str, Any]
) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Digests of the rounds, equal on all islands, and what the islands say in the end."""
    with lighthouse() as address:
        islands = Islands(folder, address, len(jobs), raw, UNTIL)
        results = islands.together(list(jobs))
    found = [islands.digests(i) for i in range(len(jobs))]
    assert all(other == found[0] for other in found)
    return found[0], results


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
def test_synchronous_rounds_have_the_same_bits(
    tmp_path: Path, emulated_cuda: Path, how: dict[str, Any]
) -> None:
    raw = config("sync", **how)
    expected, plain = run(tmp_path / "plain", raw, {}, {})
    assert len(expected) >= 7
    # Islands may differ in this, as machines do.
    found, results = run(tmp_path / "staged", raw, {"staged": True}, {"emulated": str(emulated_cuda)})
    assert found == expected
    assert all(r["holds_anchor"] for r in results)
    # Every message went through the one buffer; else own payloads are sent from where they are.
    assert [r["message_rooms"] for r in results] == [1, 1] and plain[0]["message_rooms"] > 1


@pytest.mark.parametrize("adopt", ["mix", "rebase"])
def test_an_asynchronous_run_agrees(tmp_path: Path, emulated_cuda: Path, adopt: str) -> None:
    raw = config("async", fragments=2, wire="int8", adopt=adopt)
    digests, results = run(tmp_path, raw, {"step_s": 0.01}, {"emulated": str(emulated_cuda), "step_s": 0.02})
    assert len(digests) >= 4
    assert results[0]["digest"] == results[1]["digest"] and all(r["holds_anchor"] for r in results)


@pytest.mark.parametrize("killed", [0, 1])
def test_one_heals_the_other_wherever_it_lives(tmp_path: Path, emulated_cuda: Path, killed: int) -> None:
    raw = config("sync", fragments=2, wire="int8", islands={"min_islands": 1})
    where: list[dict[str, Any]] = [{}, {"emulated": str(emulated_cuda)}]
    with lighthouse() as address:
        islands = Islands(tmp_path, address, 2, raw, 90)
        other = islands.start(1 - killed, **where[1 - killed], step_s=0.1)
        first = islands.start(killed, [fail(island=killed, at="agree", round=4, how="kill")], **where[killed])
        first.wait(60)
        results = [islands.result(islands.start(killed, **where[killed])), islands.result(other)]
    assert first.poll() is not None and results[0]["met_at"] > 0
    assert results[0]["digest"] == results[1]["digest"]


def test_a_checkpoint_moves_from_one_to_the_other(tmp_path: Path, emulated_cuda: Path) -> None:
    raw = config("sync", fragments=2, wire="int8")
    emulated: dict[str, Any] = {"emulated": str(emulated_cuda)}
    ends = []
    for name, second in (("plain", {}), ("moved", emulated)):
        with lighthouse() as address:
            islands = Islands(tmp_path / name, address, 2, raw, 24)
            islands.together([{"save_every": 24}, {"save_every": 24}])
            later = Islands(tmp_path / name, address, 2, raw, UNTIL)
            results = later.together([{"resume": True, **second}, {"resume": True}])
        assert all(r["resumed"] for r in results)
        ends.append([r["digest"] for r in results])
    assert ends[0] == ends[1]
