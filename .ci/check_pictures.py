"""Opens pictures and pages in Chromium, on a light and on a dark page, and says what a reader could not read there.

    python .ci/check_pictures.py [--shots FOLDER] PICTURE.svg PAGE.html FOLDER...

A fault is: an error on the console, a text that lies on another one, over something drawn or outside of the picture,
a text or a curve in a colour too close to the one behind it, a white sheet on a dark page.
Needs playwright, pillow and numpy of PyPI, and a chromium on the PATH or in CHROMIUM.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, sync_playwright

# What GitHub puts behind a picture.
GROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
# Of WCAG 2.2: texts, large texts, and what is drawn.
TEXT, LARGE_TEXT, DRAWN = 4.5, 3.0, 3.0
LARGE_PX = 24.0
# A wide window and a telephone. A picture has a size of its own.
PAGE_SIZES = [(1280, 800), (420, 800)]

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Text:
    says: str
    quad: list[tuple[float, float]]
    colour: Colour
    px: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shots", type=pathlib.Path, help="keep what the browser showed in this folder")
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    files = [file for path in options.paths for file in found(path)]
    if options.shots:
        options.shots.mkdir(parents=True, exist_ok=True)
    count = 0
    with chromium() as browser:
        readers = [Reader(browser, scheme, options.shots) for scheme in GROUNDS]
        for file, reader in itertools.product(files, readers):
            for fault in reader.faults(file):
                print(f"{file} ({reader.scheme}): {fault}", flush=True)
                count += 1
    if count:
        raise SystemExit(f"{count} faults in {len(files)} pictures")
    print(f"{len(files)} pictures can be read on light and on dark pages")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not path:
        raise SystemExit("there is no chromium: apt-get install chromium, or say where it is in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def found(path: pathlib.Path) -> list[pathlib.Path]:
    if not path.exists():
        raise SystemExit(f"{path} is not there")
    return sorted(it for it in path.rglob("*") if it.suffix in (".svg", ".html")) if path.is_dir() else [path]


class Reader:
    """A window of the browser whose reader has asked for light or for dark pages."""

    def __init__(self, browser: Browser, scheme: str, shots: pathlib.Path | None = None) -> None:
        self.scheme, self.shots = scheme, shots
        self.told: list[str] = []
        self.page = browser.new_page(color_scheme=scheme)
        self.page.on("console", lambda it: self.told.append(f"the console says: {it.text}") if it.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda it: self.told.append(f"a script fails: {it}"))
        self.page.on("requestfailed", lambda it: self.told.append(f"cannot be loaded: {it.url}"))
        self.page.add_init_script(path=pathlib.Path(__file__).parent / "texts.js")

    def faults(self, file: pathlib.Path) -> list[str]:
        """What is wrong with a picture or a page, in words."""
        self.told.clear()
        is_page = file.suffix == ".html"
        wrong: list[str] = []
        for size in PAGE_SIZES if is_page else [svg_size(file)]:
            self.page.set_viewport_size({"width": size[0], "height": size[1]})
            self.page.goto(file.resolve().as_uri())
            if not is_page:
                self.page.evaluate("colour => { document.documentElement.style.background = colour }", GROUNDS[self.scheme])
            if self.page.query_selector("parsererror"):
                return ["is not well-formed XML"]
            self.wait_until_drawn()
            if self.shots:
                self.page.screenshot(path=self.shots / f"{file.parent.name}-{file.stem}-{self.scheme}-{size[0]}.png")
            wrong += self.looked(size)
        return list(dict.fromkeys([*self.told, *wrong]))

    def wait_until_drawn(self) -> None:
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def looked(self, size: tuple[int, int]) -> list[str]:
        told = self.page.evaluate("drawnTexts.all()")
        texts = [Text(it["text"], [tuple(at) for at in it["quad"]], colour(it["colour"]), it["size"]) for it in told]
        curves = {colour(it) for it in self.page.evaluate(CURVES)}
        self.page.evaluate("drawnTexts.hide()")
        self.wait_until_drawn()
        behind = np.asarray(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"), dtype=np.int64)

        wrong = [] if texts else ["has no text"]
        for one, other in itertools.combinations(texts, 2):
            if overlap(one.quad, other.quad):
                wrong.append(f"{one.says!r} lies on {other.says!r}")
        for text in texts:
            wrong += readable(text, behind, size)
        sheet = most_common(behind.reshape(-1, 3))
        for it in sorted(curves):
            if contrast(it, sheet) < DRAWN:
                wrong.append(f"something drawn in {name(it)} is {contrast(it, sheet):.1f} : 1 beside {name(sheet)}, not {DRAWN}")
        if self.scheme == "dark" and luminance(sheet) > 0.2:
            wrong.append(f"a sheet of {name(sheet)} on a dark page")
        return wrong


def svg_size(file: pathlib.Path) -> tuple[int, int]:
    """The size of a picture as a page shows it."""
    head = re.search(r"<svg\b[^>]*>", file.read_text())
    lengths = [re.search(rf'\s{name}="([\d.]+)(px|pt|)"', head[0]) if head else None for name in ("width", "height")]
    px = [float(it[1]) * (4 / 3 if it[2] == "pt" else 1) for it in lengths if it]
    if len(px) != 2:
        raise SystemExit(f"{file} does not say its width and height")
    return (int(px[0] + 0.999), int(px[1] + 0.999))


# The colours of lines that are thick enough to be curves. Thinner ones are axes and grids, filled shapes have a rim.
CURVES = """[...document.querySelectorAll("svg path, svg polyline, svg line")].map(it => getComputedStyle(it))
    .filter(it => parseFloat(it.strokeWidth) >= 1.8 && it.fill === "none" && it.stroke.startsWith("rgb")).map(it => it.stroke)"""


def readable(text: Text, behind: np.ndarray, size: tuple[int, int]) -> list[str]:
    if any(x < -1 or y < -1 or x > size[0] + 1 or y > size[1] + 1 for x, y in text.quad):
        return [f"{text.says!r} reaches out of the picture"]
    left, top = (max(0, int(min(at[axis] for at in text.quad))) for axis in (0, 1))
    right, bottom = (int(max(at[axis] for at in text.quad)) + 1 for axis in (0, 1))
    around = behind[top:bottom, left:right]
    mask = Image.new("1", (around.shape[1], around.shape[0]))
    ImageDraw.Draw(mask).polygon([(x - left, y - top) for x, y in text.quad], fill=1)
    pixels = around[np.asarray(mask)]
    if len(pixels) == 0:
        return [f"{text.says!r} is too small to be seen"]
    ground = most_common(pixels)
    wrong, least = [], LARGE_TEXT if text.px >= LARGE_PX else TEXT
    if contrast(text.colour, ground) < least:
        wrong.append(f"{text.says!r} in {name(text.colour)} is {contrast(text.colour, ground):.1f} : 1 on {name(ground)}, not {least}")
    # A thin line across it has about as many pixels as the text is high.
    (x0, y0), _, _, (x3, y3) = text.quad
    if np.sum(np.abs(pixels - np.array(ground)).max(axis=1) > 12) > 0.7 * np.hypot(x3 - x0, y3 - y0):
        wrong.append(f"{text.says!r} lies over something drawn")
    return wrong


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    """Whether two convex shapes have more in common than their rims: no line parts them."""
    if any(max(at[axis] for at in a) <= min(at[axis] for at in b) for axis in (0, 1) for a, b in ((one, other), (other, one))):
        return False
    for shape in (one, other):
        for (x0, y0), (x1, y1) in zip(shape, [*shape[1:], shape[0]]):
            across = [[(x * (y1 - y0) - y * (x1 - x0)) / (np.hypot(x1 - x0, y1 - y0) or 1) for x, y in it] for it in (one, other)]
            if max(across[0]) <= min(across[1]) + 0.5 or max(across[1]) <= min(across[0]) + 0.5:
                return False
    return True


def most_common(pixels: np.ndarray) -> Colour:
    numbers, counts = np.unique(pixels @ (65536, 256, 1), return_counts=True)
    most = int(numbers[counts.argmax()])
    return (float(most >> 16), float(most >> 8 & 255), float(most & 255))


def colour(css: str) -> Colour:
    """Of `rgb(1, 2, 3)` or `#010203`."""
    if css.startswith("#"):
        return tuple(float(int(css[at : at + 2], 16)) for at in (1, 3, 5))
    numbers = [float(it) for it in re.findall(r"[\d.]+", css)]
    if not css.startswith("rgb") or len(numbers) < 3:
        raise SystemExit(f"not a colour: {css}")
    return (numbers[0], numbers[1], numbers[2])


def name(it: Colour) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in it)


def luminance(it: Colour) -> float:
    parts = [part / 255 for part in it]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


if __name__ == "__main__":
    sys.exit(main())
