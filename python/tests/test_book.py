"""The Python and the shell of the book run, page by page.

The blocks of a page run in their order, in a directory of their own. A block of Python that begins with a
comment `# name.py` is saved under that name for the shell. `sketch` behind the language leaves a block out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_versions import HAS_BACKENDS, VERSION

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(python|sh)\n((?:.*\n)*?)^```$", re.MULTILINE)
NAMED = re.compile(r"# (\w+\.py)\n")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Programs for a torch that does not load drumline by itself have the line for it."""
    line = "import torch.distributed as dist\n"
    return BLOCK.findall(page.read_text().replace(line, line + "import drumline.torch\n" * (VERSION < (2, 5))))


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if blocks(page)]


def test_the_book_has_pages_that_run():
    assert len(PAGES) > 5


READMES = [ROOT / "README.md", ROOT / "python/README.md"]

# Commands that have run, with the files that were there. What two pages show alike runs once.
HAVE_RUN: set[tuple[str, ...]] = set()


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: page.stem)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path):
    parts = blocks(page)
    if any("import torch" in text for _, text in parts) and not HAS_BACKENDS:
        pytest.skip("needs a torch with backends in Python")
    here = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([here, os.environ["PATH"]]),
        "DRUMLINE_TIMEOUT_S": "60",
    }
    files: list[str] = []
    for language, text in parts:
        named = NAMED.match(text)
        if named:
            (tmp_path / named[1]).write_text(text)
            files.append(text)
        if named or (language, text, *files) in HAVE_RUN:
            continue
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        HAVE_RUN.add((language, text, *files))


def test_the_command_line_is_what_help_prints():
    program = Path(sys.executable).parent / "drumline"
    done = subprocess.run(
        [sys.executable, DOCS / "command_line.py", program, "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_variable_that_the_table_lacks_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import settings

    assert settings.problems() == []
    # A copy of the code, with one more variable.
    crate = tmp_path / "crates" / "new" / "src"
    crate.mkdir(parents=True)
    name = "DRUMLINE_" + "NEW_THING"  # in one piece, this file would read it
    (crate / "lib.rs").write_text(f'fn read() {{ std::env::var("{name}").ok(); }}\n')
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    lacking = f"crates/new/src/lib.rs reads {name}, which docs/settings.py lacks"
    assert lacking in settings.problems()


def test_dead_links_and_missing_sections_are_found(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import check_book

    assert check_book.of_pages() == []
    sections = DOCS.parent / "crates/drumline-error/src/section.rs"
    assert check_book.of_errors(sections) == []
    more = tmp_path / "section.rs"
    more.write_text(sections.read_text().replace('    Mismatch "mismatch",', '    Mismatch "mismatch",\n    Differs "differs",'))
    assert check_book.of_errors(more) == ["section.rs: no error has the section Differs"]
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    links = ["b.html#here", "b.html#there", "c.html", "https://example.org/c.html", "#nowhere"]
    (tmp_path / "a.html").write_text("".join(f'<a href="{link}">x</a>' for link in links))
    found = check_book.of_html(tmp_path)
    assert found == [
        "a.html: this page has no #nowhere",
        "a.html: b.html has no #there",
        "a.html: there is no c.html",
    ]


def test_diffs_that_have_rotted_are_found(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import check_diffs

    assert check_diffs.main() == 0
    monkeypatch.setattr(check_diffs, "ROOT", tmp_path)
    one = "use a::{\n    b,\n};\n\n// It trains.\nfn train() {\n    let x = 1;\n    step(x);\n    save(x);\n}\n"
    many = one.replace("use a", "use c").replace("    step(x);\n", "    join();\n    step(2 * x);\n")
    many = many.replace("    save(x);\n", "    if is_first() {\n        save(x);\n    }\n")
    (tmp_path / "one.rs").write_text(one)
    (tmp_path / "many.rs").write_text(many)
    (tmp_path / "page.md").write_text(f"```rust,ignore\nsketch();\n```\n```rust\n{many}```\n")
    good = "+use c;\n let x = 1;\n-step(x);\n-save(x);\n+join();\n+step(2 * x);\n+if is_first() {\n+    save(x);\n+}\n"

    def found(comment: str, block: str) -> list[str]:
        page = tmp_path / "shows.md"
        page.write_text(f"A page.\n\n{comment}```diff\n{block}```\n")
        return [line.partition(": ")[2] for line in check_diffs.of_page(page)]

    of = "<!-- diff of one.rs and many.rs: at most {} lines -->\n".format
    for comment, block, problems in [
        (of(5), good, []),
        (of(4), good, ["changes 5 lines, more than 4"]),
        ("", good, ["no comment says of which program this diff is"]),
        (of(5).replace("many", "more"), good, ["there is no more.rs"]),
        (of(5), good.replace("+join();\n", ""), ["does not show the change `+join();`"]),
        (of(5), good.replace("step(2", "step(3"),
         ["the program has no `step(3 * x);` here", "does not show the change `+step(2 * x);`"]),
        (of(5), good.replace(" let x = 1;", " let y = 1;"), ["the program has no `let y = 1;` here"] * 2),
        ("<!-- diff to many.rs: at most 1 line -->\n", "-go();\n+join();\n step(2 * x);\n", []),
        ("<!-- diff to many.rs: at most 1 line -->\n", " step(2 * x);\n+join();\n", ["the program has no `join();` here"]),
        ("<!-- diff to page.md: at most 1 line -->\n", "+join();\n", []),
        ("<!-- diff to page.md: at most 1 line -->\n", "+sketch();\n", ["the program has no `sketch();` here"]),
    ]:
        assert found(comment, block) == problems, (comment, block)
