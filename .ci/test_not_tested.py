"""What `make test` says at its end, and what it does if torch comes slowly or not at all."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import zipfile
from collections.abc import Iterator

import not_tested

ROOT = pathlib.Path(__file__).resolve().parent.parent
# pip gives up when no byte has come for so many seconds. A wheel takes twice as long.
PATIENCE_S = 3
BYTES_PER_S = 100_000
NO_INDEX = "http://127.0.0.1:9/"


class TestNotTested(unittest.TestCase):
    def test_a_missing_torch_is_named_with_the_last_words_of_pip(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            venv = pathlib.Path(directory, "target/torch-venv")
            venv.mkdir(parents=True)
            (venv / "error.txt").write_text("WARNING: Retrying\nERROR: No matching distribution found for torch\n")
            said = not_tested.left_out(pathlib.Path(directory), [])
            self.assertIn("needs torch (ERROR: No matching distribution found for torch; make torch-venv)", said[0])
            (venv / "installed").touch()
            self.assertFalse(any("torch" in it for it in not_tested.left_out(pathlib.Path(directory), [])))

    def test_a_torch_that_comes_slowly_is_waited_for(self) -> None:
        with index() as url, checkout() as root:
            said = make_torch(root, url, CI="true")
            self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
            self.assertFalse(any("torch" in it for it in not_tested.left_out(root, [])))

    def test_a_torch_that_does_not_come_is_left_out_and_an_error_in_ci(self) -> None:
        with index(stops=True) as url, checkout() as root:
            said = make_torch(root, url, CI="false")
            self.assertEqual(said.returncode, 0, said.stdout + said.stderr)
            self.assertIn("Read timed out", not_tested.left_out(root, [])[0])
            said = make_torch(root, NO_INDEX, CI="true")
            self.assertNotEqual(said.returncode, 0, said.stdout + said.stderr)
            self.assertIn("No matching distribution found for torch", said.stderr)


@contextlib.contextmanager
def checkout() -> Iterator[pathlib.Path]:
    """A place in which `make torch` has never run."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(ROOT / "Makefile", directory)
        yield pathlib.Path(directory)


def make_torch(root: pathlib.Path, url: str, CI: str) -> subprocess.CompletedProcess[str]:  # noqa: N803
    arguments = f"--index-url {url} --timeout {PATIENCE_S} --no-cache-dir"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PIP_"))}
    return subprocess.run(
        ["make", "torch", f"PYTHON={sys.executable}", f"PIP_ARGS={arguments}", f"CI={CI}"],
        cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip


@contextlib.contextmanager
def index(stops: bool = False) -> Iterator[str]:
    """The address of an index with a torch and a numpy, slow or one that stops in the middle."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            name = self.path.strip("/").split("-")[0]
            if self.path.endswith(".whl"):
                content, kind = wheel(name), "application/zip"
            else:
                content, kind = f'<a href="/{name}-2.15.0-py3-none-any.whl">it</a>'.encode(), "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            part = BYTES_PER_S // 10
            with contextlib.suppress(ConnectionError):
                for begin in range(0, len(content), part):
                    self.wfile.write(content[begin : begin + part])
                    if len(content) > part:
                        ended.wait(None if stops and begin else 0.1)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            ended.set()
            server.shutdown()


def wheel(name: str) -> bytes:
    """A package without content that is large if it is torch."""
    about = f"{name}-2.15.0.dist-info"
    size = 2 * PATIENCE_S * BYTES_PER_S if name == "torch" else 0
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
        file.writestr(f"{name}/distributed.py", "def is_available(): return True")
        file.writestr(f"{name}/data", bytes(size))
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.15.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return out.getvalue()


if __name__ == "__main__":
    unittest.main()
