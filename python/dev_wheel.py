"""Packs what cargo has built and the Python sources into a wheel, for tests: dev_wheel.py EXTENSION COMMAND FOLDER

maturin compiles the crates of the extension alone. Their dependencies then have fewer features than in the
workspace, so it compiles all of them again. Wheels for users are maturin's (`make wheel`).
"""

import base64
import hashlib
import pathlib
import sys
import zipfile

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = pathlib.Path(__file__).parent.parent


def main(extension: str, command: str, folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    name = project["name"]
    info = f"{name}-{version}.dist-info"
    command_in_wheel = f"{name}-{version}.data/scripts/drumline"
    files = {
        command_in_wheel: pathlib.Path(command).read_bytes(),
        f"{name}/_core.abi3.so": pathlib.Path(extension).read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in project["entry-points"].items()
        ).encode(),
    }
    sources = ROOT / "python"
    for path in sorted((sources / name).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[str(path.relative_to(sources))] = path.read_bytes()
    wheel = pathlib.Path(folder) / f"{name}-{version}-py3-none-any.whl"
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        record = ""
        for path, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
            entry = zipfile.ZipInfo(path)
            # pip makes executable what is executable here.
            entry.external_attr = (0o100755 if path == command_in_wheel else 0o100644) << 16
            archive.writestr(entry, content)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
