"""Checkpoints in an object store: moto's S3 server, behind a proxy that disturbs single requests."""
