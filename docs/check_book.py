"""Checks the book: python3 docs/check_book.py [target/book]

Every page is in SUMMARY.md, once. Pages are short, but for those to look things up in. The language of every
block of code says whether it runs (see BLOCKS), and Rust runs with the tests of a crate. Every section of the page
of errors has an error that points to it. With the directory of the built book, no link in
it is dead.
"""

from __future__ import annotations

import html.parser
import pathlib
import re
import subprocess
import sys
import urllib.parse

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent

WORDS_MAX = 1500
# Their pages are looked at for one line, not read.
LOOKED_UP = {"Reference", "Drawings and notes"}

# What may stand behind ```. `rust,ignore` and `sketch` are only shown; python/tests/test_book.py runs the other
# blocks of Python and of the shell.
BLOCKS = re.compile(r"rust(,no_run|,ignore)?|(python|sh)( sketch)?|text|toml|diff")

ENTRY = re.compile(r"^ *- \[.+?\]\((.*?)\)$|^\[.+?\]\((.*?)\)$|^# (.+)$", re.MULTILINE)


def summary() -> dict[str, str]:
    """The pages in their order, each with its section."""
    section, pages = "", {}
    for entry in ENTRY.finditer((DOCS / "SUMMARY.md").read_text()):
        section = entry[3] or section
        name = entry[1] or entry[2]
        if name and name in pages:
            raise SystemExit(f"SUMMARY.md has {name} twice")
        if name:
            pages[name] = section
    return pages


def blocks(text: str) -> list[tuple[int, str, str]]:
    """Line, language and content of every block of code."""
    found = []
    for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)^```$", text, re.MULTILINE):
        found.append((text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2]))
    return found


def of_pages() -> list[str]:
    pages = summary()
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "docs"],
                            cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    there = {name.removeprefix("docs/") for name in listed if name.endswith(".md") and (ROOT / name).exists()}
    problems = [f"docs/{name} is not in SUMMARY.md" for name in sorted(there - pages.keys() - {"SUMMARY.md"})]
    problems += [f"SUMMARY.md: there is no {name}" for name in pages if not (DOCS / name).exists()]
    crates = "".join(path.read_text() for path in ROOT.glob("crates/*/src/book.rs"))
    for name, section in pages.items():
        if name not in there:
            continue
        text = (DOCS / name).read_text()
        words = len(text.split())
        if words > WORDS_MAX and section not in LOOKED_UP:
            problems.append(f"docs/{name} has {words} words, more than {WORDS_MAX}")
        for line, language, _ in blocks(text):
            if not BLOCKS.fullmatch(language):
                problems.append(f"docs/{name}:{line}: {language or 'no language'} is none of {BLOCKS.pattern}")
        has_rust = any(language in ("rust", "rust,no_run") for _, language, _ in blocks(text))
        if has_rust and f'docs/{name}")]' not in crates:
            problems.append(f"docs/{name} has Rust, which no book.rs runs")
    return problems


# Sections to which no text points, because it repeats another error, with the section of that one.
REPEATS = {"Poisoned", "Reported"}


def of_errors(sections: pathlib.Path) -> list[str]:
    """Some error has each section. (A test of drumline-error compares them with the headings of the page.)"""
    code = "".join(path.read_text() for path in ROOT.glob("crates/*/src/**/*.rs") if path != sections)
    named = set(re.findall(r"\bSection::(\w+)", code))
    known = re.findall(r'(?m)^    (\w+) "[\w-]+",$', sections.read_text())
    return [f"{sections.name}: no error has the section {name}" for name in known if name not in named | REPEATS]


class Targets(html.parser.HTMLParser):
    """What a page of HTML leads to, and what leads into it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.names.add(value)
            elif name in ("href", "src") and value:
                self.targets.add(value)


def of_html(book: pathlib.Path) -> list[str]:
    pages = {path: Targets(path.read_text()) for path in sorted(book.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        if path.name in ("print.html", "404.html", "toc.html"):
            continue  # made of the others, or with links from the root of a site
        for target in sorted(page.targets):
            url = urllib.parse.urlsplit(target)
            if url.scheme or url.netloc:
                continue
            to = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            where = f"{path.relative_to(book)}: "
            if not to.exists():
                problems.append(f"{where}there is no {target}")
            elif url.fragment and to in pages and urllib.parse.unquote(url.fragment) not in pages[to].names:
                problems.append(f"{where}{url.path or 'this page'} has no #{url.fragment}")
    print(f"{len(pages)} pages of HTML, {len(problems)} dead links")
    return problems


def main(*arguments: str) -> int:
    problems = of_pages() + of_errors(ROOT / "crates/drumline-error/src/section.rs")
    for book in arguments:
        problems += of_html(pathlib.Path(book).resolve())
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
