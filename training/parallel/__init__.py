"""The ranks: their place in the world, their rendezvous, and small collectives over plain values."""
