"""The custom resources that a job can be, and what installs them."""

from __future__ import annotations

KINDS = {
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""Kind → API version, plural."""
INSTALL = {"PyTorchJob": "the Kubeflow training-operator", "TrainJob": "Kubeflow Trainer"}
