"""python -m tests.gpu_rehearsal.kernels RECIPE PRECISION CAPABILITY…: what `compile=true` makes of a recipe's step, without a GPU.

torch.compile traces the network over the stand-in's devices, forward and backward; the kernels that it writes are
compiled by triton for each capability (80, 90, 100) and looked at with NVIDIA's cuobjdump, which comes with triton.
Nothing is launched. Prints one line of JSON a kernel: name, capability, registers, shared memory and spills in bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
import triton
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import async_compile, codecache
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lockstep.training import config, models
from lockstep.training.__main__ import leave
from lockstep.training.models.arithmetic import autocast

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BATCH = 128


class Compiled(Exception):
    """The step is compiled, and is not to be run."""


class _Driver:
    """What triton asks of a driver before it launches something."""

    @staticmethod
    def get_current_target() -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Unlaunched:
    def run(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is launched")


def traced(recipe: str, precision: str) -> list[Any]:
    """The kernels of forward and backward, as inductor wrote them."""
    found: list[Any] = []

    def keep(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> _Unlaunched:
        found.append(codecache._load_triton_kernel_from_source(name, source))
        return _Unlaunched()

    def backend(graph: Any, inputs: Any) -> Any:
        compile_fx(graph, inputs)
        raise Compiled

    async_compile.AsyncCompile.triton = keep  # type: ignore[method-assign,assign]
    triton_helpers.set_driver_to_gpu = lambda: None
    driver.set_active(_Driver())
    inductor.compile_threads, inductor.fx_graph_cache = 1, False
    inductor.use_static_cuda_launcher = inductor.shape_padding = False  # padding is decided by timing products
    functorch.enable_autograd_cache, functorch.force_non_lazy_backward_lowering = False, True
    settings = config.load(recipe, [f"precision={precision}"])
    shape = {"mlp": (1024,), "fashion_cnn": (28, 28, 1)}.get(recipe, (32, 32, 3))
    device = torch.device("cuda", 0)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    network = models.build(settings.model, settings.model_options, 10, shape).to(device).to(memory_format=layout)
    samples = torch.zeros(BATCH, shape[2], *shape[:2]) if len(shape) == 3 else torch.zeros(BATCH, *shape)
    samples = samples.to(device)
    if len(shape) == 3:
        samples = samples.contiguous(memory_format=layout)
    try:
        with autocast(settings.precision, device):
            torch.compile(network, backend=backend, fullgraph=True)(samples)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, Compiled):
            raise
    return found


def resources(kernel: Any, capability: int) -> dict[str, Any]:
    """Of the configuration that spills least: the others are not taken. Raises what triton and ptxas raise."""
    kernel.device_props = kernel.device_props._replace(cc=capability)
    rows = []
    for configuration in kernel.configs:
        made = kernel._precompile_config(configuration).kernel
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            told = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told.stdout)}
        assert f"sm_{capability}" in told.stdout or capability == int(made.metadata.target.arch)
        rows.append({
            "kernel": kernel.fn.__name__, "capability": capability, "registers": found["REG"],
            "shared": made.metadata.shared, "spilled": found["STACK"] + found["LOCAL"],
        })  # fmt: skip
    return min(rows, key=lambda row: row["spilled"])


if __name__ == "__main__":
    recipe, precision, *capabilities = sys.argv[1:]
    for kernel in traced(recipe, precision):
        for capability in capabilities:
            print(json.dumps(resources(kernel, int(capability))), flush=True)
    leave(0)
