"""What a run will need, before it is started: memory, bytes, seconds, utilisation. Pure, without torch."""

from megatron_wsd.planner.advice import Advice, advise
from megatron_wsd.planner.exchange import WIRE_BYTES, Fleet, Link, Traffic
from megatron_wsd.planner.memory import Part, memory_parts, peak
from megatron_wsd.planner.model import PRESETS, Parameter, parameters_of, vocabulary
from megatron_wsd.planner.plan import Plan, Question, make_plan
from megatron_wsd.planner.speed import GPUS, Speed

__all__ = [
    "GPUS",
    "PRESETS",
    "WIRE_BYTES",
    "Advice",
    "Fleet",
    "Link",
    "Parameter",
    "Part",
    "Plan",
    "Question",
    "Speed",
    "Traffic",
    "advise",
    "make_plan",
    "memory_parts",
    "parameters_of",
    "peak",
    "vocabulary",
]
