"""What a run folder tells: its status while it runs, and its page afterwards. Imports no torch."""
