"""The schedule in Megatron's own training loop: its flags, train_step, checkpoints and end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).with_name("megatron_pretrain.py")
FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data
    --num-workers 0 --micro-batch-size 1 --lr-decay-style WSD --eval-iters 0 --eval-interval 1000
    --log-interval 1 --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --disable-jit-fuser --no-rope-fusion --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm
"""
OPEN = "--global-batch-size 4 --train-iters 1000 --lr 1e-2 --min-lr 0 --lr-warmup-iters 2 --wsd-open-horizon"
COMMAND = '{"length": "5 steps", "shape": "linear"}'
# two looks into the control folder are ten updates apart, so the decay is from iteration 11 to 15
RATES = [0.005, *[0.01] * 9, 0.008, 0.006, 0.004, 0.002, 0.0]

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="no megatron.training: megatron-core brings it from 0.19 on",
    ),
]


class Job(NamedTuple):
    code: int
    output: str
    iterations: dict[
        int, tuple[float, float, str, int]
    ]  # rate, loss, norm of the gradient, iterations to make


def megatron(line: str, *flags: str | Path, ranks: int = 2) -> Job:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # DeepSpeed sets it where it is imported, as in other tests: torch.compile then looks for a driver
    env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, str(SCRIPT), *FLAGS.split(), *line.split(), *map(str, flags)]
    done = subprocess.run(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    line = r" iteration +(\d+)/ +(\d+) .*? learning rate: (\S+) .*? lm loss: (\S+) .*? grad norm: (\S+)"
    iterations = {
        int(number): (float(rate), float(loss), norm, int(end))
        for number, end, rate, loss, norm in re.findall(line, done.stdout)
    }
    return Job(done.returncode, done.stdout, iterations)


class Whole(NamedTuple):
    job: Job
    control: Path
    checkpoints: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run with an open end, told to decay; checkpoints after 12 updates, in the decay, and at the end."""
    folder = tmp_path_factory.mktemp("whole")
    control, checkpoints = folder / "control", folder / "checkpoints"
    control.mkdir()
    (control / "decay_now.json").write_text(COMMAND)
    saves = "--save", checkpoints, "--save-interval", "12"
    return Whole(megatron(OPEN, "--wsd-control-dir", control, *saves), control, checkpoints)


def rates(job: Job) -> list[float]:
    assert job.code == 0, job.output[-4000:]
    return [job.iterations[number][0] for number in sorted(job.iterations)]


def test_a_decay_begun_by_a_file_and_the_end_of_training_where_it_ends(whole: Whole) -> None:
    assert rates(whole.job) == pytest.approx(RATES, rel=1e-6, abs=0)  # Megatron prints seven digits
    assert sorted(whole.job.iterations) == list(range(1, 16))
    assert [end for *_, end in whole.job.iterations.values()] == [1000] * 14 + [15]
    losses = [loss for _, loss, *_ in whole.job.iterations.values()]
    assert losses[-1] < losses[0] - 1, "it learns"
    assert (whole.control / "decay_now.accepted.json").exists()
    assert (whole.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "15"


def test_resumed_in_the_decay_it_goes_on_alike(whole: Whole) -> None:
    job = megatron(OPEN, "--wsd-control-dir", whole.control, "--load", whole.checkpoints, "--ckpt-step", "12")
    assert job.code == 0, job.output[-4000:]
    # Megatron prints the mean loss of the first two iterations as that of the second
    first, second, third = (whole.job.iterations[number] for number in (13, 14, 15))
    mean = pytest.approx((first[1] + second[1]) / 2, rel=1e-6)
    assert job.iterations == {13: first, 14: (second[0], mean, *second[2:]), 15: third}


def test_resumed_after_the_end_it_trains_no_more(whole: Whole) -> None:
    job = megatron(OPEN, "--load", whole.checkpoints)
    assert job.code == 0, job.output[-4000:]
    assert "successfully loaded checkpoint" in job.output and not job.iterations


def test_another_decay_is_refused_or_overrides(whole: Whole) -> None:
    """Of its length, which upstream's scheduler does not save. (Its optimizer refuses other rates.)"""
    line = f"{OPEN} --lr-wsd-decay-iters 7 --load {whole.checkpoints} --ckpt-step 12"
    refused = megatron(line)
    assert refused.code != 0 and not refused.iterations
    assert "class input value 28 and checkpointvalue None for wsd_decay_steps" in refused.output
    # the decay that was begun on command is the checkpoint's in any case
    assert rates(megatron(line, "--override-opt-param-scheduler")) == pytest.approx(
        RATES[12:], rel=1e-6, abs=0
    )


def test_in_samples_with_a_batch_that_grows() -> None:
    line = "--train-samples 48 --lr 1e-2 --min-lr 1e-3 --lr-wsd-decay-samples 12"
    line += " --wsd-decay-shape linear --wsd-decay-start 36"
    # 640 tokens are 20 samples, so ten updates of 2 and then of 4: 14 at the peak, then down by thirds
    job = megatron(line, "--step-batch-size-schedule", "0:2 640:4", ranks=1)
    assert rates(job) == pytest.approx([0.01] * 14 + [0.007, 0.004, 0.001], rel=1e-6, abs=0)
