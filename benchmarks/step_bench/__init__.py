"""Parts of the optimizer-step benchmark; `cgad_step.py` beside this folder is the command."""
