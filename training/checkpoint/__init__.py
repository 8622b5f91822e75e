"""Verified checkpoints: what they hold, how they are written and read, and when a run saves one."""
