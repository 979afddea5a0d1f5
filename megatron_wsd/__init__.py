"""WSD schedules, DiLoCo across islands and CGAD for DeepSpeed ZeRO-3 and Megatron."""

__version__ = "0.1.0"
