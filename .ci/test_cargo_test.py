"""Which tests of a run failed, and that nothing else did: python3 .ci/test_cargo_test.py"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from cargo_test import failed_tests

UNIT = "     Running unittests src/lib.rs (target/debug/deps/drumline_shm-0123456789abcdef)"
FILE = "     Running tests/cli/main.rs (target/debug/deps/cli-0123456789abcdef)"
ENDED = "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s"


class FailedTests(unittest.TestCase):
    def test_they_have_their_target(self):
        lines = [UNIT, "failures:", "---- a::b stdout ----", "    words", "failures:", "    a::b", "", ENDED]
        lines += [FILE, "failures:", "    c", "    d", "", ENDED, "error: 2 targets failed:"]
        expected = [("--lib", "a::b"), ("--test", "cli", "c"), ("--test", "cli", "d")]
        self.assertEqual(failed_tests(lines), expected)

    def test_what_ended_without_their_names_is_something_else(self):
        failed = [FILE, "failures:", "    c", "", ENDED]
        for other in (
            [UNIT, "error: test failed, to rerun pass `--lib`"],  # a signal
            ["   Doc-tests drumline", "failures:", "    src/lib.rs (line 1)", "", ENDED],
        ):
            with self.subTest(other):
                self.assertIsNone(failed_tests([*other, *failed, "error: 2 targets failed:"]))
        self.assertIsNone(failed_tests(["error: could not compile `drumline`"]))


if __name__ == "__main__":
    unittest.main()
