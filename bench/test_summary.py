"""Tests of the short page: python3 -m unittest discover -s bench"""

import contextlib
import io
import pathlib
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from unittest import mock

import step
import summary
from page import BEGIN, END
from picture import MATPLOTLIB, speeds
from summary import Tables, pictured, times, time_us

try:
    from matplotlib import __version__ as drawing
except ImportError:
    drawing = "none"
draws = unittest.skipUnless(drawing == MATPLOTLIB, f"needs matplotlib {MATPLOTLIB}; here: {drawing}")

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
            with mock.patch.dict(sys.modules, {"matplotlib": None}), contextlib.redirect_stderr(io.StringIO()) as said:
                summary.write(tables, page)
            text = page.read_text()
            self.assertIn("page.svg stays as it is: pip install matplotlib", said.getvalue())
            self.assertFalse(page.with_suffix(".svg").exists())
        self.assertIn("| all_reduce 64 MiB | 14.3 ms | 6,242 µs | 31.5 ms (Intel MPI) | **2.20** |", text)
        self.assertNotIn("all_gather", text)
        self.assertIn("1 of 2 goals are reached", text)
        self.assertIn("- 1 MiB, Intel MPI / staged: 1.50 (wanted: 2.00)", text)

    def test_the_kept_page_follows_from_the_kept_tables(self) -> None:
        tables = Tables((ROOT / "docs/notes/measurements.md").read_text())
        text = summary.summary(tables, "performance.svg", "notes/measurements.md")
        self.assertIn(text.strip(), (ROOT / "docs/performance.md").read_text())

    @draws
    def test_the_kept_picture_follows_from_the_kept_tables(self) -> None:
        tables = Tables((ROOT / "docs/notes/measurements.md").read_text())
        self.assertEqual((ROOT / "docs/performance.svg").read_text(), summary.picture(tables))

    @draws
    def test_the_kept_picture_of_a_step_follows_from_its_kept_times(self) -> None:
        self.assertEqual(step.DRAWN.read_text(), step.drawn())

    def test_buckets_are_those_of_the_step(self) -> None:
        event = lambda ph, us, number: {"ph": ph, "ts": us, "cat": "bucket", "id2": {"local": number}, "args": {"bytes": 4e6}}
        events = [event("b", 1.0, "0"), event("e", 2.0, "0"), event("b", 5.0, "1"), event("b", 6.5, "2"), event("e", 7.0, "1"),
                  event("e", 9.5, "2"), {"ph": "X", "ts": 6.0, "cat": "collective"}]
        self.assertEqual(step.buckets(events, 4000, 9000), [("4 MB", 5000, 7000)])

    def test_a_curve_has_the_medians_of_its_column(self) -> None:
        curves = pictured(Tables(MEASURED))
        self.assertEqual(curves["drumline, any buffer"], [("8 B", 0.39), ("64 MiB", 14_300)])
        self.assertEqual(curves["MPICH"], [("8 B", 0.67), ("64 MiB", 39_900)])
        self.assertNotIn("Open MPI", curves)

    @draws
    def test_points_lie_where_their_times_are_and_text_is_escaped(self) -> None:
        sizes = {"1 B": 1, "1 MiB": 1 << 20}
        drawn = ElementTree.fromstring(speeds("a < b", sizes, {"x & y": [("1 B", 10.0), ("1 MiB", 1000.0)]}))
        path = next(part for part in drawn.iter() if "stroke: #2f7fd8" in part.get("style", "")).get("d", "")
        (left, low), (right, high) = [tuple(map(float, at)) for at in re.findall(r"([\d.]+) ([\d.]+)", path)]
        ticks = [part for part in drawn.iter() if part.text in ("10 µs", "1 ms")]
        ten_us, one_ms = (float(tick.get("y", "0")) for tick in ticks)
        self.assertLess(left, right)
        self.assertAlmostEqual(low - high, ten_us - one_ms, places=3)
        self.assertIn("x & y", "".join(drawn.itertext()))


if __name__ == "__main__":
    unittest.main()
