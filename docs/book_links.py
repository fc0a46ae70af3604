"""A preprocessor of mdBook: links to files outside of the book lead to the repository, or are plain text; and the page
of schedules gets all drawings that `make schedules` has made.

The pages are read in the repository, too, where links such as ../crates/x/src/lib.rs work. A built book has
only what is below docs/.
"""

from __future__ import annotations

import json
import pathlib
import posixpath
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
NAMED = re.compile(r"^\[([^\]]+)\]:\s+(\S+)\s*$", re.MULTILINE)
CODE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)


def repository() -> str | None:
    found = re.search(r'^repository = "(.+?)/?"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    return found and found[1]


def outside(page: str, target: str) -> str | None:
    """The path in the repository, if the target is a file that is not in the book."""
    if re.match(r"[a-z][a-z0-9+.-]*:|#", target, re.IGNORECASE):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target.partition("#")[0]))
    return None if path.startswith("docs/") else path


def rewrite(page: str, text: str, url: str | None) -> str:
    def link(found: re.Match[str]) -> str:
        path = outside(page, found[3])
        if path is None:
            # mdBook calls the page of a folder index.
            return re.sub(r"(?<![^(/])README\.md", "index.md", found[0])
        return f"{found[1]}[{found[2]}]({url}/blob/main/{path})" if url else found[2]

    # [`Name`]: path, and the places that use it.
    for name, target in NAMED.findall(text):
        path = outside(page, target)
        if path is not None:
            definition = f"[{name}]: {target}"
            text = text.replace(definition, f"[{name}]: {url}/blob/main/{path}" if url else "")
            if not url:
                text = text.replace(f"[{name}]", name)
    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(link, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, LINK.sub(link, text[at:])])


def gallery(text: str) -> str:
    """Every drawing that the page does not show yet, in the place that it has for them."""
    names = sorted(path.stem for path in (ROOT / "docs/schedules").glob("*.svg"))
    others = [f"![{name}]({name}.svg)" for name in names if f"]({name}.svg)" not in text]
    return text.replace("<!-- the other drawings -->", "\n".join(["## The other drawings", "", *others]))


def each(items: list, url: str | None) -> None:
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            if chapter.get("path") == "schedules/README.md":
                chapter["content"] = gallery(chapter["content"])
            if chapter.get("path"):
                chapter["content"] = rewrite(chapter["path"], chapter["content"], url)
            each(chapter["sub_items"], url)


def main() -> None:
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    each(book.get("items", book.get("sections")), repository())
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
