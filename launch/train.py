#!/usr/bin/env python3
"""What the `deepspeed` launcher runs on every rank of an island."""

import sys

from megatron_wsd.train import main

if __name__ == "__main__":
    sys.exit(main())
