"""Strategies to learn from and to compare with, and Horovod's interface. They stand on the engine of `sync/buckets.py`."""
