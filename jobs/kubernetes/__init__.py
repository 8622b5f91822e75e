"""Jobs on Kubernetes: PyTorchJob or TrainJob."""
