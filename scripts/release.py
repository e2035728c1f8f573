"""Builds and checks what a release consists of: `make release`. It uploads nothing.

The sources are those of the commit HEAD. The wheel is built from the source
distribution, which so is known to be complete.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PROJECTS = {
    ".": ("txmq", "spark/txmq_spark", "txmq_command.py"),
    "adapters/faststream": ("txmq_faststream",),
}
NEEDED = ("License-Expression", "Requires-Python", "Summary", "Description-Content-Type")
NEXT = "to upload them, push the tag v{version}: .github/workflows/release.yml does it"


def main() -> None:
    """Build into dist/, check, and say what comes next."""
    if _git("status", "--porcelain"):
        sys.exit("release: the working tree has changes: commit them first")
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    version = build(out)
    if f"\n## {version} (not released)\n" in (ROOT / "CHANGES.md").read_text("utf-8"):
        print(f"release: CHANGES.md still says that {version} is not released", file=sys.stderr)
    print(*sorted(path.name for path in out.iterdir()), NEXT.format(version=version), sep="\n")


def build(out: Path) -> str:
    """Build all distributions of HEAD into `out`, and check them; return their
    version.
    """
    with TemporaryDirectory(prefix="txmq-release-") as directory:
        source = Path(directory)
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(source, filter="data")
        versions = {
            _build(source, project, packages, out) for project, packages in PROJECTS.items()
        }
    if len(versions) != 1:
        sys.exit(f"release: the projects have different versions: {sorted(versions)}")
    return versions.pop()


def _build(source: Path, project: str, packages: tuple[str, ...], out: Path) -> str:
    settings = tomllib.loads((source / project / "pyproject.toml").read_text("utf-8"))["project"]
    # the lock's setuptools, without a network
    arguments = (
        "build",
        "--quiet",
        "--offline",
        "--no-build-isolation",
        "--python",
        sys.executable,
    )
    subprocess.run(
        [sys.executable, "-m", "uv", *arguments, "--out-dir", out, source / project], check=True
    )
    name, version = settings["name"].replace("-", "_"), settings["version"]
    check_wheel(out / f"{name}-{version}-py3-none-any.whl", source / project, packages, version)
    return str(version)


def check_wheel(wheel: Path, project: Path, packages: tuple[str, ...], version: str) -> None:
    """Require of a wheel each file of its packages and no other, and whole metadata."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        wanted = {name for package in packages for name in _files(project / package)}
        if inside != wanted:
            sys.exit(f"release: {wheel.name} differs in {sorted(inside ^ wanted)[:9]}")
        [metadata] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    missing = [name for name in NEEDED if not headers[name]]
    if headers["Version"] != version or missing:
        sys.exit(f"release: {wheel.name} of version {headers['Version']} lacks {missing}")


def _files(package: Path) -> set[str]:
    if package.is_file():
        return {package.name}
    files = (
        file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    return {file.relative_to(package.parent).as_posix() for file in files}


def _git(*arguments: str) -> str:
    ran = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return ran.stdout.strip()


if __name__ == "__main__":
    main()
