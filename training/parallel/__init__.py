"""The ranks: their place in the world, their rendezvous, and small collectives over plain values."""

from .world import World, detect, joined, script

__all__ = ["World", "detect", "joined", "script"]
