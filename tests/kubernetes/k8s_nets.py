"""What the pods of the tests train: seconds of start-up are what they cost, not the network."""

from __future__ import annotations

from tests.nets import NormedConv, Paced


class PacedNormed(Paced, NormedConv):
    """With batch statistics and dropout, and as slow as a test needs it."""
