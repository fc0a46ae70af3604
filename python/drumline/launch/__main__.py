"""``python -m drumline.launch``: the command ``drumline launch``, in the place of ``python -m torch.distributed.launch``."""

import sys

from drumline.__main__ import run

if __name__ == "__main__":
    run(["launch", *sys.argv[1:]])
