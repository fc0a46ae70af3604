"""The check of pictures finds what it is there to find."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from check_pictures import GROUNDS, Reader, chromium

GOOD = '<text x="10" y="20" fill="#777777">one</text><text x="10" y="40" fill="#777777">two</text>'
PAGE = "<!doctype html><style>:root {{ color-scheme: light dark }}</style><p>text</p><canvas></canvas><script>{}</script>"
ON_CANVAS = """const pen = document.querySelector("canvas").getContext("2d");
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    addEventListener("keydown", draw); draw();
    function draw() { pen.clearRect(0, 0, 300, 150); pen.fillStyle = dark ? "#fff" : "#000"; TEXTS }"""


class Faults(unittest.TestCase):
    def setUp(self) -> None:
        browser = self.enterContext(chromium())
        self.readers = {scheme: Reader(browser, scheme) for scheme in GROUNDS}
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def found(self, name: str, text: str, scheme: str) -> str:
        file = self.folder / name
        file.write_text(text)
        return "\n".join(self.readers[scheme].faults(file))

    def in_picture(self, content: str, scheme: str = "light") -> str:
        head = '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" font-size="12" font-family="sans-serif">'
        return self.found("picture.svg", f"{head}{content}</svg>", scheme)

    def test_pictures(self) -> None:
        dark = "<style>@media (prefers-color-scheme: dark) { text { fill: #eeeeee } }</style>"
        for content, scheme, fault in [
            (GOOD.replace("777777", "555555"), "light", ""),
            (GOOD.replace("777777", "555555") + dark, "dark", ""),
            (GOOD.replace("777777", "555555"), "dark", "'one' in #555555 is"),
            (GOOD.replace('y="40"', 'y="24"').replace("777777", "555555"), "light", "'one' lies on 'two'"),
            ('<text x="10" y="20" transform="rotate(30 10 20)">a long one</text><text x="30" y="50">two</text>', "light", "lies on"),
            ('<text x="10" y="20" transform="rotate(30 10 20)">a long one</text><text x="10" y="70">two</text>', "light", ""),
            ('<text x="180" y="20">far right</text>', "light", "'far right' reaches out of the picture"),
            ('<path d="M20 0V90" stroke="red"/><text x="10" y="20">one</text>', "light", "'one' lies over something drawn"),
            ('<path d="M30 0V90" stroke="#d0d7de"/><text x="10" y="20">a text of some length</text>', "light", "lies over something drawn"),
            ('<path d="M90 0V90" fill="none" stroke-width="2" stroke="#dddddd"/><text x="10" y="20">one</text>', "light", "drawn in #dddddd"),
            ('<rect width="200" height="100" fill="white"/><text x="10" y="20">one</text>', "dark", "a sheet of #ffffff"),
            ("<text>", "light", "is not well-formed XML"),
            ("", "light", "has no text"),
        ]:  # fmt: skip
            with self.subTest(content=content, scheme=scheme):
                said = self.in_picture(content, scheme)
                self.assertIn(fault, said)
                self.assertEqual(bool(fault), bool(said), said)

    def test_pages(self) -> None:
        apart, together = 'pen.fillText("one", 10, 20); pen.fillText("two", 10, 60);', 'pen.fillText("one", 10, 20); pen.fillText("two", 12, 22);'
        for script, fault in [
            (ON_CANVAS.replace("TEXTS", apart), ""),
            (ON_CANVAS.replace("TEXTS", together), "'one' lies on 'two'"),
            ("throw new Error('broken')", "a script fails: broken"),
            ("console.error('bad')", "the console says: bad"),
            ("document.body.append(Object.assign(new Image(), { src: 'file:///none.png' }))", "none.png"),
        ]:
            for scheme in ("light", "dark"):
                with self.subTest(script=script, scheme=scheme):
                    said = self.found("page.html", PAGE.format(script), scheme)
                    self.assertIn(fault, said)
                    self.assertEqual(bool(fault), bool(said), said)


if __name__ == "__main__":
    unittest.main()
