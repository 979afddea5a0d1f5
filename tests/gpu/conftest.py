"""The GPU tests share references and scenarios of tests/numerics and tests/distributed."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("numerics", "distributed"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
