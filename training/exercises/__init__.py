"""Programs on top of the rest, which imports none of them."""
