"""Tests of the short page: python3 -m unittest discover -s bench"""

import pathlib
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

import summary
from page import BEGIN, END
from picture import bars
from summary import Tables, times, time_us

ROOT = pathlib.Path(__file__).parent.parent

MEASURED = f"""# Measurements
{BEGIN}

2026-01-02, commit abc; a machine; `make bench ROUNDS=3`. More.

### Goals

<!-- section: goals -->

| goal | at least | near | far | reached |
|---|---:|---:|---:|---|
| 8 B: Intel MPI / staged | 1.00 | 1.18 |  | yes |
| 1 MiB: Intel MPI / staged | 2.00 | 1.50 |  | no |

### all_reduce

<!-- section: all_reduce -->

|  | cores | rounds | staged | registered | Intel MPI | MPICH | gloo | fastest MPI / staged |
|---|---|---:|---:|---:|---:|---:|---:|---:|
| 8 B | far | 1 | 0.90 |  | 0.95 |  |  | **1.06** |
| 8 B | near | 3 | 0.39 (0.30–0.46) | 0.41 | 0.46 | 0.67 | 658 | **1.18** |
| 64 MiB | near | 3 | 14.3 ms (11.4 ms–14.9 ms) | 6,242 | 31.5 ms | 39.9 ms | 80.8 ms | **2.20** |

{END}
"""


class Summary(unittest.TestCase):
    def test_a_cell_is_read_as_its_median_in_microseconds(self) -> None:
        self.assertEqual(time_us("91 (90–94)"), 91)
        self.assertEqual(time_us("1,044.0 ms (1,031.7 ms–1,057.3 ms)"), 1_044_000)
        self.assertIsNone(time_us(""))

    def test_near_cores_come_first_and_ratios_are_those_of_the_table(self) -> None:
        tables = Tables(MEASURED)
        row = tables.row("all_reduce", "8 B")
        assert row is not None
        self.assertEqual(row["cores"], "near")
        self.assertEqual(times(row, "Intel MPI", "staged"), 1.18)
        self.assertAlmostEqual(times(row, "gloo", "staged") or 0, 658 / 0.39)
        self.assertIsNone(tables.row("all_reduce", "1 KiB"))

    def test_the_page_has_the_rows_that_were_measured_and_the_goals_that_were_missed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tables, page = pathlib.Path(folder) / "tables.md", pathlib.Path(folder) / "page.md"
            tables.write_text(MEASURED)
            page.write_text(f"# Performance\n{BEGIN}\n{END}\nmore\n")
            summary.write(tables, page)
            text = page.read_text()
            ElementTree.parse(page.with_suffix(".svg"))
        self.assertIn("| all_reduce 64 MiB | 14.3 ms | 6,242 µs | 31.5 ms (Intel MPI) | **2.20** |", text)
        self.assertNotIn("all_gather", text)
        self.assertIn("1 of 2 goals are reached", text)
        self.assertIn("- 1 MiB, Intel MPI / staged: 1.50 (wanted: 2.00)", text)

    def test_the_kept_page_and_its_picture_follow_from_the_kept_tables(self) -> None:
        page = ROOT / "docs/performance.md"
        tables = Tables((ROOT / "docs/notes/measurements.md").read_text())
        text = summary.summary(tables, "performance.svg", "notes/measurements.md")
        self.assertIn(text.strip(), page.read_text())
        self.assertEqual(page.with_suffix(".svg").read_text(), summary.picture(tables))

    def test_a_bar_is_as_high_as_its_value_and_text_is_escaped(self) -> None:
        drawn = ElementTree.fromstring(bars("a < b", ["x"], [("g", [2.0]), ("h", [1.0])], "one"))
        rectangles = [part for part in drawn.iter() if part.tag.endswith("rect") and part.get("width") == "30"]
        heights = [float(part.get("height", "0")) for part in rectangles]
        self.assertAlmostEqual(heights[0], 2 * heights[1], places=0)


if __name__ == "__main__":
    unittest.main()
