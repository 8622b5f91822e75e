from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from lockstep.training.data.spool import Spool


def test_shards_are_to_the_byte_what_the_library_writes(tmp_path: Path) -> None:
    for kind, shape in ((np.uint8, (2, 3, 1)), (np.float32, (5,))):
        samples = np.arange(7 * np.prod(shape)).reshape(7, *shape).astype(kind)
        labels = np.arange(7)
        spool = Spool(tmp_path / "spool")
        spool.append(samples[:3], labels[:3].astype(np.uint8), "a")
        spool.append(samples[3:], labels[3:], "a")
        (entry,) = spool.cut(tmp_path, np.dtype(kind).name, 1, 7)
        spool.close()
        safetensors.numpy.save_file({"images": samples, "labels": labels}, tmp_path / "expected")
        assert (tmp_path / entry["file"]).read_bytes() == (tmp_path / "expected").read_bytes()
    assert not (tmp_path / "spool").exists()
