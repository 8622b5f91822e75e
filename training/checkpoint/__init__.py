"""Verified checkpoints: their content, their writing and reading on a disk or in a bucket, and plain files of weights."""
