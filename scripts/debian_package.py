"""Builds a Debian package of the broker: `make deb`.

It brings a virtual environment in /opt/txmq with the locked versions, for the python3
of the Debian that it is built on, the unit, a commented /etc/txmq.toml, alert rules,
dashboards and the documents.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGING = ROOT / "packaging"
PYTHON = "/usr/bin/python3"
SCRIPTS = ("postinst", "prerm")  # of the maintainer
FILES = {  # of the package, by their places in packaging/
    "txmq.toml": "etc/txmq.toml",
    "systemd": "lib/systemd/system",
    "prometheus": "usr/share/txmq/prometheus",
    "grafana": "usr/share/txmq/grafana",
}
DOCUMENTS = "usr/share/doc/txmq"  # of the package, with the places that they have here
DOCUMENTED = (
    "README.md", "CHANGES.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs", "spark/README.md",
    "packaging/txmq.toml", "examples/services",
)  # fmt: skip


def main() -> None:
    """Build the package below build/deb, and print its path."""
    build = ROOT / "build" / "deb"
    shutil.rmtree(build, ignore_errors=True)
    tree = build / "tree"
    stage(tree, version=_version(), python=_of_python("'%d.%d' % sys.version_info[:2]"))
    install(build, tree / "opt" / "txmq")
    print(pack(tree, build))


def stage(tree: Path, *, version: str, python: str) -> None:
    """Put everything but the virtual environment into the tree of the package."""
    for source, target in FILES.items():
        _copy(PACKAGING / source, tree / target)
    stage_documents(tree)
    command = tree / "usr" / "bin" / "txmq"
    command.parent.mkdir(parents=True)
    command.symlink_to("/opt/txmq/bin/txmq")
    control = tree / "DEBIAN"
    control.mkdir()
    for name in (*SCRIPTS, "conffiles"):
        shutil.copy(PACKAGING / "debian" / name, control)
    for name in SCRIPTS:
        (control / name).chmod(0o755)
    text = (PACKAGING / "debian" / "control").read_text()
    major, minor = python.split(".")
    architecture = _output("dpkg", "--print-architecture")
    fields = {"version": version, "architecture": architecture, "python": python}
    following = f"{major}.{int(minor) + 1}"
    (control / "control").write_text(text.format(**fields, next_python=following))


def stage_documents(tree: Path) -> None:
    """Put the documents into the tree, so that hints and links which name one by its
    place in the project hold there, too.
    """
    place = tree / DOCUMENTS
    for name in DOCUMENTED:
        _copy(ROOT / name, place / name)
    _copy(ROOT / "LICENSE", place / "copyright")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def install(build: Path, place: Path) -> None:
    """Make the virtual environment, which runs wherever it is moved to."""
    locked = build / "requirements.txt"
    _run(
        *_uv("pip", "compile"), "--quiet", "--extra", "kafka", "--generate-hashes",
        "--no-emit-index-url", "--constraint", ROOT / "requirements" / "lock.txt",
        "--python", PYTHON, "--output-file", locked, ROOT / "pyproject.toml",
    )  # fmt: skip
    _run(*_uv("venv"), "--quiet", "--relocatable", "--python", PYTHON, place)
    python = place / "bin" / "python"
    into: tuple[str | Path, ...] = (
        *_uv("pip", "install"), "--quiet", "--compile-bytecode", "--no-deps", "--python", python,
    )  # fmt: skip
    _run(*into, "--require-hashes", "--requirements", locked)
    for name in (".lock", ".gitignore"):  # of uv
        (place / name).unlink(missing_ok=True)
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # setuptools would ship what is stale
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", build)
    _run(sys.executable, "-m", "pip", "wheel", *options, ROOT)
    _run(*into, next(build.glob("txmq-*.whl")))


def pack(tree: Path, build: Path) -> Path:
    """Return the package of a tree."""
    package = build / f"txmq_{_version()}_{_output('dpkg', '--print-architecture')}.deb"
    _run("dpkg-deb", "--root-owner-group", "--build", tree, package, stdout=subprocess.DEVNULL)
    return package


def _version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def _of_python(expression: str) -> str:
    return _output(PYTHON, "-c", f"import sys; print({expression})")


def _uv(*command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "uv", *command)


def _run(*command: str | Path, stdout: int | None = None) -> None:
    # what is compiled belongs into the package
    environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPYCACHEPREFIX"}
    words = [str(word) for word in command]
    subprocess.run(words, check=True, cwd=ROOT, stdout=stdout, env=environment)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
