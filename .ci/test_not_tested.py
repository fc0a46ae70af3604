"""What `make test` says at its end."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

import not_tested


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


if __name__ == "__main__":
    unittest.main()
