"""The GPU path, rehearsed without a GPU: torch's own CUDA side over a stand-in for what NVIDIA supplies (README.md)."""
