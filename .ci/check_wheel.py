"""Installs a wheel as a user does, and runs what the READMEs show: python3 .ci/check_wheel.py WHEEL

The environment is new, HOME is empty, and there is no Rust on the PATH. torch is that of `make torch-venv`. Without
it, what needs torch is left out, and it says so.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH_VENV = ROOT / "target/torch-venv"
sys.path.insert(0, str(ROOT / "docs"))
from check_book import blocks  # noqa: E402


def main(wheel: str) -> None:
    has_torch = (TORCH_VENV / "installed").exists()
    with tempfile.TemporaryDirectory() as folder:
        home = pathlib.Path(folder)
        venv = home / "venv"
        environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment |= {"HOME": folder, "PATH": f"{venv}/bin:/usr/bin:/bin", "DRUMLINE_TIMEOUT_S": "60"}
        if shutil.which("rustc", path=environment["PATH"]):
            raise SystemExit("rustc is in /usr/bin or /bin: nothing is shown of a machine without Rust")

        def run(*command: str) -> None:
            print("+", *command, flush=True)
            subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600)

        run(sys.executable, "-m", "venv", str(venv))
        run("python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(pathlib.Path(wheel).resolve()))
        if has_torch:
            (site,) = TORCH_VENV.glob("lib/python3*/site-packages")
            (own,) = venv.glob("lib/python3*/site-packages")
            (own / "torch.pth").write_text(f"{site}\n")
        if not (venv / "bin/drumline").read_bytes().startswith(b"\x7fELF"):
            raise SystemExit("the command drumline is a script: each job would wait for an interpreter first")
        run("drumline", "--version")
        run("python", "-m", "drumline", "--version")
        run("drumline", "check")
        run("python", "-c", "import drumline; print(drumline.__file__)")

        for page in (ROOT / "README.md", ROOT / "python/README.md"):
            left_out = set()
            for line, language, text in blocks(page.read_text()):
                name = text.split("\n", 1)[0].removeprefix("# ")
                if language == "python" and "import torch" in text and not has_torch:
                    print(f"left out, there is no torch: {page.relative_to(ROOT)}:{line}")
                    left_out.add(name)
                elif language == "python":
                    (home / name).write_text(text)
                elif language == "sh" and not any(name in text for name in left_out):
                    run("bash", "-euc", text)


if __name__ == "__main__":
    main(*sys.argv[1:])
