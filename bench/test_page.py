"""Tests of the tables: python3 -m unittest discover -s bench"""

import unittest

from page import BEGIN, END, Figure, Goal, Ratio, Results, goals, replaced, state, table

RATIO = Ratio("MPI / ours", ("A", "B"), "ours")


def results() -> Results:
    found = Results()
    for us, cores in [(2.0, "near"), (4.0, "near"), (3.0, "near"), (9.0, "far"), (50.0, "mixed")]:
        found.add(Figure("8 B", "ours", us, 0.5), cores)
    for column, us, cores in [("A", 6.0, "near"), ("B", 4.5, "near"), ("A", 4.5, "far")]:
        found.add(Figure("8 B", column, us), cores)
    return found


class Page(unittest.TestCase):
    def test_cores_are_near_or_far_before_and_after(self) -> None:
        self.assertEqual(state([45.0, 46.0]), "near")
        self.assertEqual(state([160.0, 220.0]), "far")
        self.assertEqual(state([45.0, 220.0]), "mixed")
        self.assertEqual(state([]), "unknown")

    def test_only_like_is_compared_with_like(self) -> None:
        found = results()
        self.assertEqual(found.states("8 B"), ["far", "near"])
        self.assertEqual(found.ratio("8 B", "near", RATIO), 1.5)
        self.assertEqual(found.ratio("8 B", "far", RATIO), 0.5)
        self.assertIsNone(found.ratio("1 KiB", "near", RATIO))

    def test_a_table_has_a_line_for_each_state_and_gaps_for_what_is_not_there(self) -> None:
        lines = table(results(), ["ours", "A", "B"], [RATIO], False).splitlines()
        self.assertEqual(lines[0], "|  | cores | rounds | ours | A | B | MPI / ours |")
        self.assertEqual(lines[2], "| 8 B | far | 1 | 9.00 | 4.50 |  | **0.50** |")
        self.assertEqual(lines[3], "| 8 B | near | 3 | 3.00 (2.00–4.00) | 6.00 | 4.50 | **1.50** |")

    def test_goals_hold_in_all_states_or_the_page_says_in_which(self) -> None:
        def verdict(least: float, row: str = "8 B") -> str:
            line = goals({"s": results()}, [("s", Goal(RATIO, (row,), least))]).splitlines()[2]
            return line.split("|")[-2].strip()

        self.assertEqual(verdict(0.4), "yes")
        self.assertEqual(verdict(1.0), "in one state")
        self.assertEqual(verdict(2.0), "no")
        self.assertEqual(verdict(1.0, "1 KiB"), "not measured")

    def test_only_what_is_between_the_marks_is_replaced(self) -> None:
        page = f"prose\n{BEGIN}\nold\n{END}\nmore prose\n"
        new = replaced(page, "new\n")
        self.assertEqual(new, f"prose\n{BEGIN}\n\nnew\n\n{END}\nmore prose\n")
        self.assertEqual(replaced(new, "new"), new)
        with self.assertRaises(SystemExit):
            replaced("no marks", "new")


if __name__ == "__main__":
    unittest.main()
