"""`python -m lockstep.training launch`: starts the ranks of a node and waits for their end."""
