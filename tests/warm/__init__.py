"""Ranks of tests: forked from a server that has everything imported, each a real process (tests/README.md)."""
