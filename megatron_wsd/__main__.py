"""``python -m megatron_wsd`` is the command ``megatron-wsd``."""

from megatron_wsd.cli import main

if __name__ == "__main__":
    main()
