"""python tortured.py FOLDER [FLAW]: a training without torch that resumes right, or has a flaw. It is lost-cursor, not-atomic,
orphan, or random.

40 steps of an arithmetic that depends on their order; a checkpoint every fourth one.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

folder, flaw = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
folder.mkdir(exist_ok=True)
saved = folder / "state.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weights": [1] * 20_000}
helper = subprocess.Popen(["sleep", "300"]) if flaw == "orphan" else None
if flaw == "lost-cursor":
    state["step"] = 0
for step in range(state["step"] + 1, 41):
    state = {"step": step, "weights": [(weight * 5 + step) % 1_000_003 for weight in state["weights"]]}
    noise = random.random() if flaw == "random" else 0
    state["weights"][0] += int(1000 * noise)
    print(f"step {step}")
    if step % 4 == 0:
        target = saved if flaw == "not-atomic" else folder / "new.tmp"
        with target.open("w") as file:
            for letter in range(0, len(text := json.dumps(state)), 20_000):
                file.write(text[letter : letter + 20_000])
                file.flush()
                time.sleep(0.05 if flaw == "not-atomic" else 0.004)  # a machine that stalls must not miss the moment
        os.replace(target, saved)
if helper is not None:
    helper.kill()
