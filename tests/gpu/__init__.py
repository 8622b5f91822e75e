"""Whole runs on the GPUs of this machine (`make test-gpu`): with `--device cpu`, the default, the same runs without one."""
