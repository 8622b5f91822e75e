"""`python -m training launch`: starts the ranks of a node and sees them end."""
