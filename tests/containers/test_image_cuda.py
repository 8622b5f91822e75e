"""The CUDA image. The tests run on demand (`make test SUITE=cuda-image`), because a build moves gigabytes.

There is no GPU here: the image builds, has the right content, and trains on the CPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.test_images import run
from tests.engine import NAME, SENTINEL, build, docker

pytestmark = [pytest.mark.containers, pytest.mark.cuda_image]


@pytest.fixture(scope="module")
def cuda_image(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    certificates = tmp_path_factory.mktemp("ca") / "ca.pem"
    certificates.write_text(f"# {SENTINEL}\n{bundle.read_text() if bundle.exists() else ''}")
    yield build("image", CA=str(certificates), WHEELS=os.environ.get("WHEELS_CUDA", ""))
    docker("image", "rm", "--force", *docker("images", "--quiet", "--no-trunc", NAME).split()[:1])


def python(image: str, program: str) -> str:
    code, output = run(image, "-c", program, options=("--entrypoint", "python"))
    assert code == 0, output
    return output.strip()


def test_one_copy_of_cuda_and_it_is_torchs(cuda_image: str) -> None:
    program = "import torch; print(torch.version.cuda, torch.cuda.nccl.version(), torch.cuda.is_available())"
    assert re.fullmatch(r"\d+\.\d+ \(\d+, \d+, \d+\) False", python(cuda_image, program))
    names = ("libcudart.so*", "libcudnn.so*", "libnccl.so*", "libcublas.so*")
    find = "find / -xdev -type f \\( " + " -o ".join(f"-name '{name}'" for name in names) + " \\)"
    code, output = run(cuda_image, "-c", find, options=("--entrypoint", "sh", "--user", "0"))
    libraries = [Path(line).name.split(".so")[0] for line in output.split()]
    assert code == 0 and len(set(libraries)) == len(libraries) >= 4, output
    assert all(line.startswith("/opt/venv/") for line in output.split()), output


def test_it_trains_on_the_cpu_where_there_is_no_gpu(cuda_image: str) -> None:
    words = ("--ranks", "2", "run", "smoke", "--run-dir", "/runs/x", "--set", "epochs=1", "threads=1")
    code, output = run(cuda_image, *words)
    assert code == 0 and "Final validation accuracy" in output, output
    code, output = run(cuda_image, *words, "device=cuda")
    assert code == 2 and "no GPU is visible" in output, output
