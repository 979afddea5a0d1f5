"""install(): into Megatron's training code, the real one and one played by modules with the same names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron
import pytest
from megatron.core import optimizer_param_scheduler as upstream
from megatron.core import package_info

from megatron_wsd.errors import ScheduleError
from megatron_wsd.schedule.megatron import OptimizerParamScheduler, install

TRAINING = """
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.arguments import parse_args
ARGS = None
def get_args():
    return ARGS
def get_optimizer_param_scheduler(optimizer):
    args = get_args()
    scale = args.global_batch_size if args.train_iters else 1
    decay = args.lr_wsd_decay_iters if args.train_iters else args.lr_wsd_decay_samples
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=0,
        lr_decay_steps=(args.train_iters or args.train_samples) * scale, lr_decay_style="WSD",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=10, wd_incr_style="constant",
        wsd_decay_steps=None if decay is None else decay * scale, lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
"""
ARGUMENTS = """
from argparse import ArgumentParser
def add_megatron_arguments(parser):
    for name in ("train-iters", "train-samples", "lr-wsd-decay-iters", "lr-wsd-decay-samples"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--lr-wsd-decay-style", default="exponential")
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=100)
    parser.add_argument("--step-batch-size-schedule")
    return parser
def parse_args(line):
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(line)
"""


@pytest.fixture(autouse=True)
def core_left_as_it_was() -> Iterator[None]:
    before = upstream.OptimizerParamScheduler
    yield
    upstream.OptimizerParamScheduler = before


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's training code is not found, installed or not; megatron.core has a path of its own."""
    for name in [name for name in sys.modules if name.split(".")[:2] == ["megatron", "training"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(megatron, "training", raising=False)
    monkeypatch.setattr(megatron, "__path__", [])


@pytest.fixture
def played(no_training: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    for name, text in (("__init__", ""), ("training", TRAINING), ("arguments", ARGUMENTS)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(megatron, "__path__", [str(tmp_path / "megatron")])
    importlib.invalidate_caches()
    yield importlib.import_module("megatron.training.training")
    for name in [name for name in sys.modules if name.split(".")[:2] == ["megatron", "training"]]:
        del sys.modules[name]
    if hasattr(megatron, "training"):
        del megatron.training


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("no megatron.training: megatron-core brings it from 0.19 on")
    modules = [importlib.import_module(f"megatron.training.{name}") for name in ("training", "arguments")]
    for module, name in zip(modules, ("OptimizerParamScheduler", "add_megatron_arguments"), strict=True):
        monkeypatch.setattr(module, name, getattr(module, name))  # install() replaces it: put back at the end
    yield modules[0]
    sys.modules["megatron.training.global_vars"].unset_global_variables()


@pytest.fixture(params=["played", "real"])
def training(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


# what the real command line cannot do without, and what makes it the played one's equal
REAL_LINE = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 100 --seq-length 100 "
    "--micro-batch-size 1 --lr 1.0 --min-lr 0.0 --lr-decay-style WSD --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion"
)


def build(training: Any, *line: str) -> OptimizerParamScheduler:
    arguments = sys.modules["megatron.training.arguments"]
    if hasattr(training, "ARGS"):
        training.ARGS = arguments.parse_args(line)
    else:
        batch = () if "--step-batch-size-schedule" in line else ("--global-batch-size", "8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["pretrain_gpt.py", *REAL_LINE.split(), *batch, *line])
            args = arguments.validate_args(arguments.parse_args())
        settings = sys.modules["megatron.training.global_vars"]
        settings.unset_global_variables()
        settings.set_global_variables(args, build_tokenizer=False)
    return training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[{}]))


def test_core_alone(no_training: None) -> None:
    assert install() == ["megatron.core.optimizer_param_scheduler.OptimizerParamScheduler"]
    assert upstream.OptimizerParamScheduler is OptimizerParamScheduler
    assert install() == []


def test_training_builds_ours_and_upstreams_flags_keep_working(training: Any) -> None:
    assert len(install()) == 3 and install() == []
    scheduler = build(training, "--train-iters", "100", "--lr-wsd-decay-iters", "10")
    assert isinstance(scheduler, OptimizerParamScheduler)
    (decay,) = scheduler.schedule.decays
    assert (decay.start, decay.length, decay.shape) == (720, 80, "megatron_exponential")


@pytest.mark.parametrize(
    "line,decay",
    [
        (["--train-iters", "100", "--lr-wsd-decay-iters", "10", "--wsd-decay-start", "50"], (400, 80)),
        (["--train-samples", "900", "--lr-wsd-decay-samples", "80", "--wsd-decay-start", "400"], (400, 80)),
        (
            ["--train-iters", "100", "--lr-wsd-decay-iters", "10", "--wsd-decay-start", "4e4 tokens"],
            (400, 80),
        ),
    ],
)
def test_decay_start(training: Any, line: list[str], decay: tuple[int, int]) -> None:
    install()
    scheduler = build(training, *line, "--wsd-decay-shape", "polynomial", "--wsd-decay-power", "2")
    (found,) = scheduler.schedule.decays
    assert (found.start, found.length, found.shape, found.power) == (*decay, "polynomial", 2.0)


def test_decay_start_in_iterations_needs_a_constant_batch(training: Any) -> None:
    install()
    line = ["--train-samples", "900", "--lr-wsd-decay-samples", "80"]
    line += ["--step-batch-size-schedule", "0:4 1K:8"]
    assert build(training, *line, "--wsd-decay-start", "400").schedule.decays[0].start == 400
    with pytest.raises(ScheduleError, match="--wsd-decay-start: expected a length in samples"):
        build(training, *line, "--wsd-decay-start", "50 steps")


def test_open_horizon_a_command_and_the_end_of_training(training: Any, tmp_path: Path) -> None:
    install()
    line = ["--train-iters", "1000", "--wsd-open-horizon", "--wsd-control-dir", str(tmp_path)]
    scheduler = build(training, *line)
    args = training.get_args()
    iteration = 0
    while iteration < args.train_iters:  # Megatron's own loop compares so
        if iteration == 42:
            (tmp_path / "decay_now.json").write_text('{"length": "5 steps", "shape": "linear"}')
        args.curr_iteration = iteration
        scheduler.step(increment=8)
        iteration += 1
    assert scheduler.schedule.decays[0].start == 400  # looked for every ten updates
    assert iteration == 55 and scheduler.phase == "done"
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.0


def test_back_to_stable_trains_on(training: Any) -> None:
    install()
    scheduler = build(training, "--train-iters", "30", "--wsd-open-horizon")
    scheduler.begin_decay(8, then="stable")
    for iteration in range(30):
        training.get_args().curr_iteration = iteration
        scheduler.step(increment=8)
    assert training.get_args().train_iters == 30


def untouched() -> bool:
    return upstream.OptimizerParamScheduler is OptimizerParamScheduler.__mro__[1]


@pytest.mark.parametrize("version", [(0, 15), (0, 17), (0, 20), (1, 16)])
def test_unknown_version_refused(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "MAJOR", version[0])
    monkeypatch.setattr(package_info, "MINOR", version[1])
    with pytest.raises(ScheduleError, match=r"0\.16\.x and 0\.19\.x"):
        install()
    assert untouched()


def test_unknown_signature_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(upstream.OptimizerParamScheduler):
        def __init__(self, optimizer: Any, peak: float) -> None: ...

    monkeypatch.setattr(upstream, "OptimizerParamScheduler", Other)
    with pytest.raises(ScheduleError, match="the parameters"):
        install()
    assert upstream.OptimizerParamScheduler is Other


def test_a_finished_run_that_is_resumed_trains_no_more(training: Any) -> None:
    install()
    line = ["--train-iters", "1000", "--wsd-open-horizon"]
    scheduler = build(training, *line)
    scheduler.begin_decay("5 steps", start=400, shape="linear")
    middle = None
    for iteration in range(55):
        training.get_args().curr_iteration = iteration
        scheduler.step(increment=8)
        middle = scheduler.state_dict() if iteration == 52 else middle
    assert training.get_args().train_iters == 55
    for state, end in ((scheduler.state_dict(), 55), (middle, 1000)):
        resumed = build(training, *line)
        resumed.load_state_dict(state)  # Megatron loads before it says curr_iteration
        assert not hasattr(training.get_args(), "curr_iteration")
        assert training.get_args().train_iters == end
        assert resumed.num_steps == state["num_steps"]


def test_the_load_of_a_state_is_no_update(training: Any, tmp_path: Path) -> None:
    install()
    line = ["--train-iters", "1000", "--wsd-open-horizon", "--wsd-control-dir", str(tmp_path)]
    scheduler = build(training, *line)
    scheduler.step(increment=8)
    resumed = build(training, *line)
    resumed.load_state_dict(scheduler.state_dict())
    (tmp_path / "decay_now.json").write_text('{"length": "5 steps"}')
    for _ in range(9):
        resumed.step(increment=8)
    assert not resumed.schedule.decays  # ten updates lie between two looks
    resumed.step(increment=8)
    assert resumed.schedule.decays


def test_unknown_training_refused_and_core_left_alone(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["megatron.training.arguments"], "add_megatron_arguments")
    with pytest.raises(ScheduleError, match="add_megatron_arguments, to replace it"):
        install()
    assert untouched()
    assert training.OptimizerParamScheduler is upstream.OptimizerParamScheduler


def test_flags_are_on_the_command_line_only_after_install(training: Any) -> None:
    arguments = sys.modules["megatron.training.arguments"]

    def known() -> set[str]:
        parser = arguments.add_megatron_arguments(ArgumentParser())
        return {flag for action in parser._actions for flag in action.option_strings}

    before = known()
    install()
    assert known() - before == {
        *("--wsd-decay-start", "--wsd-open-horizon", "--wsd-decay-shape", "--wsd-decay-power"),
        "--wsd-control-dir",
    }
    assert "--lr-wsd-decay-style" in before
