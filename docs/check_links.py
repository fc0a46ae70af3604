"""Fails if a page links to a file or a heading that is not there: python3 docs/check_links.py

It looks at relative links of every Markdown page that git knows, and at nothing in the network.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# [text](target), ![text](target) and [name]: target
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
# A fence ends at a line that begins as it does.
CODE = re.compile(r"^(```+|~~~+).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages() -> list[pathlib.Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    names: dict[str, int] = {}
    found = set()
    fenced = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", fenced.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", shown))
        number = names.get(name, 0)
        names[name] = number + 1
        found.add(f"{name}-{number}" if number else name)
    return found | set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def blank(code: re.Match[str]) -> str:
    """Code is no link. Its lines are kept, so that line numbers stay right."""
    return re.sub(r"[^\n]", "x", code[0])


def moved(path: pathlib.Path) -> str:
    """A hint: files of the same name in a folder of the same name."""
    known = subprocess.run(["git", "ls-files", f"*/{path.parent.name}/{path.name}"],
                           cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return f" (perhaps {' or '.join(known)})" if 0 < len(known) <= 3 else ""


def dead(page: pathlib.Path) -> list[str]:
    text = CODE.sub(blank, page.read_text())
    problems = []
    for link in LINK.finditer(text):
        target = link[1] or link[2]
        if ELSEWHERE.match(target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        line = text.count("\n", 0, link.start()) + 1
        where = f"{page.relative_to(ROOT)}:{line}"
        if not path.exists():
            problems.append(f"{where}: there is no {target}{moved(path)}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            problems.append(f"{where}: {name or 'this page'} has no heading #{anchor}")
    return problems


def main() -> int:
    problems = [problem for page in pages() for problem in dead(page)]
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
