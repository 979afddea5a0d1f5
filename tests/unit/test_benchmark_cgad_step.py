"""The parts of benchmarks/cgad_step.py that need no clock: bytes, first steps, verdicts, tables, files."""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

cgad_step = importlib.import_module("cgad_step")
contenders = importlib.import_module("step_bench.contenders")
floor = importlib.import_module("step_bench.floor")
measure = importlib.import_module("step_bench.measure")
plot = importlib.import_module("step_bench.plot")
problem = importlib.import_module("step_bench.problem")
report = importlib.import_module("step_bench.report")
results = importlib.import_module("step_bench.results")
traffic = importlib.import_module("step_bench.traffic")

CPU = torch.device("cpu")
NS = {  # as one machine of two cores might show them, 2 threads
    "ours8": 0.74,
    "ours32": 0.95,
    "torch_fused": 1.1,
    "torch_foreach": 5.0,
    "deepspeed": 1.05,
    "torch_plain8": 40.0,
    "bitsandbytes8": 35.0,
    "torchao8": 18.0,
}


def make_results(ns: dict[str, float], sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Results and floors of 1 and 2 threads, small sizes twice as fast."""
    rows, floors = [], []
    for threads in (1, 2):
        for n in sizes:
            scale = (0.5 if n < 2**22 else 1.0) * (1.6 if threads == 1 else 1.0)
            mine = [
                results.Floor(
                    "adam8", n, threads, 16.0625, {"stores": [0.5 * scale], "other": [0.6 * scale]}
                ),
                results.Floor("adam32", n, threads, 28.0, {"stores": [0.85 * scale]}),
                results.Floor("copy", n, threads, 8.0, {"copy": [0.3 * scale]}),
            ]
            floors += mine
            for c in contenders.ALL:
                if c.key in ns:
                    at = ns[c.key] * scale
                    state = 2.03125 if c.traffic.key == "adam8" else 8.0
                    rows.append(
                        results.Result(
                            c.key,
                            c.label,
                            c.ours,
                            c.traffic.key,
                            n,
                            threads,
                            c.traffic.total,
                            state,
                            (at * 1.2, at, at * 0.9),
                            results.floor_of(mine, c.traffic),
                        )
                    )
    return rows, floors


def make_document(tmp_path: Path, ns: dict[str, float], sizes: tuple[int, ...]) -> dict[str, Any]:
    given = cgad_step.arguments(["--sizes", "2^14", "--out", str(tmp_path)])
    run = cgad_step.Run(given, Console(file=io.StringIO()))
    run.results, run.floors = make_results(ns, sizes)
    return run.document([], load_before=0.1)


def test_bytes_are_those_of_the_operands() -> None:
    """Summed over real tensors, so that the formula cannot drift from what a step reads and writes."""
    n, block = 4096, traffic.BLOCK_SIZE
    p, g = torch.zeros(n), torch.zeros(n)
    for mix, key in ((traffic.adam8(), "ours8"), (traffic.adam32(), "ours32")):
        contender = next(c for c in contenders.ALL if c.key == key)
        _, state = contender.make(problem.Problem(p, (g,), 1, 0))
        held = sum(t.numel() * t.element_size() for t in state())
        assert contender.traffic == mix
        assert mix.read * n == 2 * 4 * n + held
        assert mix.written * n == 4 * n + held
        assert contenders.state_bytes(state(), n) == held / n
    assert traffic.adam8(block).total == 16.0625
    assert traffic.adam32().total == 28.0


@pytest.mark.parametrize("key", ["ours8", "ours32", "torch_fused", "torch_foreach", "torch_plain8"])
def test_contenders_take_the_same_first_step(key: str) -> None:
    contender = next(c for c in contenders.ALL if c.key == key)
    given = problem.Problem.make(8192, CPU, threads=1, seed=3)
    before = given.p.clone()
    step, _ = contenders.build(contender, given, checked=True)
    wanted = problem.first_step(before, given.grads[0])
    assert (given.p.double() - wanted).abs().max() <= problem.FIRST_STEP_TOLERANCE
    step(given.grads[1])
    assert torch.isfinite(given.p).all()


def test_plain_torch_follows_adam() -> None:
    """After 20 steps the 8-bit codec has changed the path by less than a third of its length."""
    given = problem.Problem.make(8192, CPU, threads=1, seed=3)
    start = given.p.clone()
    reference = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([reference], **contenders._hyper())
    contender = next(c for c in contenders.ALL if c.key == "torch_plain8")
    step, _ = contender.make(given)
    for k in range(20):
        reference.grad = given.grads[k % 8]
        adam.step()
        step(given.grads[k % 8])
    path = reference.detach() - start
    assert (given.p - start - path).norm() < path.norm() / 3


def test_a_contender_that_does_something_else_is_not_timed() -> None:
    def make(given: Any) -> tuple[Any, Any]:
        return lambda grad: given.p.sub_(grad, alpha=1e-3), lambda: ()

    other = contenders.Contender("sgd", "SGD", traffic.adam32(), ("cpu",), make)
    with pytest.raises(contenders.AbsentError, match="away from AdamW's"):
        contenders.build(other, problem.Problem.make(4096, CPU, 1, 0), checked=True)


def test_absent_contenders_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem.Problem.make(4096, CPU, 1, 0)
    by_key = {c.key: c for c in contenders.ALL}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(contenders.AbsentError, match="not installed"):
        contenders.build(by_key["bitsandbytes8"], given, checked=False)

    def broken(_: Any) -> Any:
        raise NotImplementedError("no kernel for cpu\nand more")

    no_path = contenders.Contender("x", "x", traffic.adam8(), ("cpu",), broken)
    with pytest.raises(contenders.AbsentError, match=r"no cpu path: NotImplementedError: no kernel for cpu$"):
        contenders.build(no_path, given, checked=False)
    on_gpu = contenders.Contender("x", "x", traffic.adam8(), ("cuda",), broken)
    with pytest.raises(contenders.AbsentError, match="no cpu path"):
        contenders.build(on_gpu, given, checked=False)


@pytest.mark.parametrize("mix", [traffic.adam8(), traffic.adam32()], ids=lambda mix: mix.key)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_floor_changes_nothing(mix: Any, threads: int) -> None:
    given = problem.Problem.make(256 * 7, CPU, threads, 0)
    before, grad = given.p.clone(), given.grads[0].clone()
    for run in floor.runners(given, mix).values():
        run(2)
    assert torch.equal(given.p, before)
    assert torch.equal(given.grads[0], grad)


@pytest.mark.skipif(floor._stream() is None, reason="no C++ compiler")
@pytest.mark.parametrize("element", [1, 4])
@pytest.mark.parametrize("bypass", [0, 1])
def test_the_floor_reads_and_writes_every_byte(element: int, bypass: int) -> None:
    """With all bits of the mask set, x ^= x clears a state and p ^= g mixes both, wherever it passed."""
    n, threads = 256 * 7, 2
    p = torch.arange(n, dtype=torch.int32)
    g = torch.full((n,), 5, dtype=torch.int32)
    a = torch.full((element * n,), 7, dtype=torch.uint8)
    b, scales = a.clone(), torch.full((8 * n // 256,), 7, dtype=torch.uint8)
    buffers = (t.data_ptr() for t in (p, g, a, b, scales))
    floor._stream()(*buffers, element, n, 1, threads, bypass, 2**32 - 1)
    assert torch.equal(p, torch.arange(n, dtype=torch.int32) ^ 5)
    assert not a.any()
    assert not b.any()
    assert not scales.any()


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    runners = {name: lambda calls, name=name: order.append(name) for name in "abc"}
    samples = measure.interleaved(runners, 3, 1e-9, CPU, lambda name: None)
    # Two calls each before the first round: one warms up, one tells how many calls make a sample.
    assert order[6:] == list("abcbcacab")
    assert {name: len(s) for name, s in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_figures_are_medians_of_bytes_and_floor() -> None:
    rows, floors = make_results(NS, (2**26,))
    ours = next(r for r in rows if r.contender == "ours8" and r.threads == 2)
    assert ours.ns == pytest.approx(0.74)
    assert ours.gb_per_s == pytest.approx(16.0625 / 0.74)
    assert ours.fraction == pytest.approx(0.5 / 0.74)  # the faster of the two ways to move the bytes
    assert floors[0].way == "stores"


def judged(ns: dict[str, float], absent: dict[str, str], device: str, threads: int) -> dict[str, Any]:
    rows, _ = make_results(ns, (2**25, 2**26))
    return {v.what: v for v in results.verdicts(rows, absent, device, threads)}


def test_verdicts_name_every_figure() -> None:
    found = judged(NS, {}, "cpu", 2)
    by_need = [(what, v.passed, v.need) for what, v in found.items()]
    assert by_need == [
        ("fraction of the floor, 2^26, all 2 threads", True, ">= 0.6"),
        ("DeepSpeedCPUAdam, fp32 / ours, time, 2^25, all 2 threads", True, ">= 1"),
        ("DeepSpeedCPUAdam, fp32 / ours, time, 2^26, all 2 threads", True, ">= 1"),
        ("torch AdamW fused, fp32 / ours, time, 2^25, all 2 threads", True, ">= 1"),
        ("torch AdamW fused, fp32 / ours, time, 2^26, all 2 threads", True, ">= 1"),
        ("bitsandbytes AdamW, 8-bit / ours, time, 2^26, all 2 threads", True, ">= 20"),
        ("torchao AdamW, 8-bit / ours, time, 2^26, all 2 threads", True, ">= 20"),
        ("state of 8-bit CGAD, bytes a parameter", True, "<= 2.04"),
    ]


def test_a_slow_step_fails_every_ratio() -> None:
    found = judged(NS | {"ours8": 9.0}, {}, "cpu", 2)
    assert [v.passed for v in found.values()] == [False] * 7 + [True]


def test_what_was_not_measured_is_said() -> None:
    ns = {key: value for key, value in NS.items() if key not in ("deepspeed", "bitsandbytes8")}
    absent = {"deepspeed": "left out", "bitsandbytes8": "not installed"}
    found = judged(ns, absent, "cpu", 2)
    missing = {what: v.note for what, v in found.items() if v.passed is None}
    assert missing == {
        "deepspeed / ours, time, 2^25, all 2 threads": "left out",
        "deepspeed / ours, time, 2^26, all 2 threads": "left out",
        "bitsandbytes8 / ours, time, 2^26, all 2 threads": "not installed",
    }
    assert all(v.passed is None for v in judged(NS, {}, "cpu", 64).values())  # never with fewer threads


def test_gpu_verdicts_ask_for_more_of_the_floor() -> None:
    found = judged(NS, {}, "cuda", 2)
    first = next(iter(found.values()))
    assert (first.need, first.passed) == (">= 0.85", False)
    assert "torchao AdamW, 8-bit / ours, time, 2^26, GPU" in found
    assert not any("DeepSpeed" in what for what in found)


def test_document_tables_and_picture(tmp_path: Path) -> None:
    document = make_document(tmp_path, NS, (2**14, 2**20, 2**25, 2**26))
    paths = cgad_step.write(document, tmp_path)
    assert [p.name for p in paths] == ["cgad_step_cpu.json", "cgad_step_cpu.md", "cgad_step_cpu.png"]
    read = json.loads(paths[0].read_text())
    assert read["schema"] == results.SCHEMA
    assert read["quiet"] is True
    assert {"cpu", "threads", "isa", "memory_gib"} <= read["machine"].keys()
    assert {"python", "torch", "megatron_wsd"} <= read["versions"].keys()
    assert len(read["results"]) == len(NS) * 4 * 2
    fields = set(results.Result.__dataclass_fields__) | {"ns", "gb_per_s", "fraction_of_floor"}
    assert all(row.keys() == fields for row in read["results"])
    assert [t["total"] for t in read["traffic"]] == [16.0625, 28.0]
    assert read["absent"] == [
        {
            "contender": "deepspeed",
            "label": "DeepSpeedCPUAdam, fp32",
            "reason": "left out; --with-deepspeed-cpu-adam builds it",
        }
    ]

    text = paths[1].read_text()
    assert "| CGAD 8-bit (ours) | 16.06 | 2.03 | 0.37 (68%) | 0.37 (68%) | 0.74 (68%) | 0.74 (68%) |" in text
    assert "seed 0" in text
    assert "Not measured: DeepSpeedCPUAdam, fp32: left out" in text
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_table_shows_everyone_and_who_is_missing() -> None:
    rows, floors = make_results(NS, (2**20,))
    console = Console(file=io.StringIO(), width=160)
    console.print(report.configuration(rows[len(NS) :], floors[3:], {"torchao AdamW, 8-bit": "no cpu path"}))
    text = console.file.getvalue()
    assert "N = 2^20 (1,048,576), 2 threads" in text
    lines = [line for line in text.splitlines() if "CGAD 8-bit (ours)" in line]
    assert len(lines) == 1
    for cell in ("0.370", "0.333 - 0.444", "16.06", "43.4", "68%", "2.03", "1.00"):
        assert cell in lines[0]
    assert "no cpu path" in text
    assert "floor adam32, stores" in text


def test_labels_keep_their_distance() -> None:
    values = [0.5, 0.51, 0.52, 1.0, 7.0, 7.1]
    placed = plot._apart(values, 1.2)
    assert all(b / a >= 1.2 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed == sorted(placed)
    assert plot._apart([1.0, 2.0], 1.2) == [1.0, 2.0]


@pytest.mark.parametrize("text", ["2^x", "1000", "256", "2^40", ""])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cgad_step.sizes(text)


def test_arguments() -> None:
    assert cgad_step.sizes("2^14,65536,2^14") == [2**14, 2**16]
    assert cgad_step.threads("2,1") == [1, 2]
    with pytest.raises(argparse.ArgumentTypeError):
        cgad_step.threads("0")
    with pytest.raises(SystemExit):
        cgad_step.arguments(["--contenders", "nobody"])
    assert cgad_step.arguments([]).sizes[0] == 2**14
    assert cgad_step.arguments([]).sizes[-1] == 2**26
    assert not cgad_step.arguments([]).with_deepspeed_cpu_adam


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of README.md on the smallest size, with two contenders."""
    before = torch.get_num_threads()
    flags = "--sizes 4096 --threads 1 --repetitions 1 --sample-s 1e-6 --contenders ours8,torch_fused"
    try:
        assert cgad_step.main([*flags.split(), "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(before)
    assert "What it must reach" in capsys.readouterr().out
    document = json.loads((tmp_path / "cgad_step_cpu.json").read_text())
    assert [row["contender"] for row in document["results"]] == ["ours8", "torch_fused"]
    assert document["command"].endswith(flags + f" --out {tmp_path}")
    assert document["absent"] == []
