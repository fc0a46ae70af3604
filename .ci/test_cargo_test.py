"""Which tests of a program failed: python3 .ci/test_cargo_test.py"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from cargo_test import failures

ENDED = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s"


class Failures(unittest.TestCase):
    def test_the_last_list_names_them(self):
        lines = ["running 3 tests", "failures:", "---- a::b stdout ----", "    words", "", "failures:", "    a::b", "    c"]
        self.assertEqual(failures("\n".join([*lines, "", ENDED])), ["a::b", "c"])

    def test_a_program_that_ended_before_its_list_names_none(self):
        self.assertEqual(failures("running 3 tests\ntest a ... ok\n    words\n"), [])


if __name__ == "__main__":
    unittest.main()
