"""Code of one's own that travels with a job: which files, what is refused, one read, one copy."""
