"""Ranks of tests: forked from a server that has everything imported, each a real process (tests/README.md)."""

LAST = b"last"
"""What the server says to the last test process that leaves it: it ends now."""
