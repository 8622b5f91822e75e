"""The ranks: who they are, how they meet, and small collectives over plain values."""

from .world import World, detect, joined, script

__all__ = ["World", "detect", "joined", "script"]
