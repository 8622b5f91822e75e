"""One attempt of a run: from its config to its first step, and from its last one to its exit code."""
