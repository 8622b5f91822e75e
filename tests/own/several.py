"""python -m tests.own.several FOLDER CODE CASES: a rank runs a script once for each list of words in CASES (JSON).

FOLDER gets the output of each case, and the exit code of each rank.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist


def main(folder: Path, code: str, cases: list[list[str]]) -> None:
    for number, words in enumerate(cases):
        sys.argv = ["-c", *words]
        output = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        ended = "0"
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as error:
            ended = str(error.code or 0)
        except BaseException:
            traceback.print_exc()
            ended = "1"
        (folder / f"{number}-{os.environ['RANK']}").write_text(ended)
        if dist.is_initialized():  # an error at the end of a Session leaves its group
            dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
