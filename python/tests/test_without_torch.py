"""Without torch, parts that need it say so, and all others work."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = None  # as if it was not installed
import drumline
from drumline import *
assert "DistributedDataParallel" in dir(drumline)
try:
    drumline.DistributedDataParallel
except ImportError as error:
    print(error)
"""


def test_a_wrapper_without_torch_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "need torch" in done.stdout and "pip install" in done.stdout, done.stdout
