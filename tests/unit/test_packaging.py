"""What ships is what there is, under the import names we promise (docs/decisions/0001-packaging.md)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.plain_user import copy_checkout

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"datastore/csi": "../csi", "datastore/fuse": "../fuse", "datastore/manifests": "../manifests"}
TOP_LEVEL = {
    *("datastore", "fuse", "csi", "manifests", "tests", "bench", "docs", "examples"),
    *("pyproject.toml", "README.md", "Makefile", "Dockerfile"),
}


def _settings() -> dict[str, object]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"])


def _packages_in_tree() -> set[str]:
    found = set()
    for folder, name in (("datastore", "datastore"), ("fuse", "datastore.fuse"), ("csi", "datastore.csi")):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if not any((ROOT / folder).joinpath(*parts[: i + 1]).is_symlink() for i in range(len(parts))):
                found.add(".".join((name, *parts)))
    return found | {"datastore.manifests"}


def test_the_package_list_is_the_tree() -> None:
    assert set(_settings()["packages"]) == _packages_in_tree()  # type: ignore[call-overload]


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in ("datastore", "fuse", "csi"):
        for module in (ROOT / folder).rglob("*.py"):
            assert module.with_name("__init__.py").exists(), f"{module} is in no package"


def test_nothing_imports_our_folders_by_their_own_names() -> None:
    forbidden = re.compile(r"^\s*(?:import|from)\s+(?:fuse|csi)\b", re.MULTILINE)
    for folder in ("datastore", "fuse", "csi", "tests", "bench"):
        for module in (ROOT / folder).rglob("*.py"):
            assert not forbidden.search(module.read_text()), f"{module} must import datastore.fuse or datastore.csi"


def test_the_links_serve_the_bare_checkout() -> None:
    for link, target in LINKS.items():
        assert (ROOT / link).is_symlink()
        assert str((ROOT / link).readlink()) == target


def test_the_mapping_names_the_folders_the_links_name() -> None:
    mapped = {"datastore": "datastore"} | {link.replace("/", "."): target[3:] for link, target in LINKS.items()}
    assert _settings()["package-dir"] == mapped


def test_the_top_level_is_what_the_readme_says() -> None:
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:  # a copy without its repository: what is there is what was copied
        top = {entry.name for entry in ROOT.iterdir()}
    else:
        top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} - {"build", "dist"} <= TOP_LEVEL


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_from_the_sdist_imports_anywhere_under_our_names_only(tmp_path: Path) -> None:
    copy_checkout(tmp_path / "checkout")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), "checkout"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"datastore"}
    assert "datastore/fuse/ops.py" in names
    manifests = [each for kind in ("yaml", "json") for each in (ROOT / "manifests").rglob(f"*.{kind}")]
    assert {f"datastore/{each.relative_to(ROOT)}" for each in manifests} <= set(names)

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    # From /, and without dependencies: the modules that need none.
    program = (
        "import datastore.fuse.ops, datastore.csi, datastore.manifests, datastore.errors, importlib.util as u;"
        "assert u.find_spec('fuse') is None and u.find_spec('csi') is None"
    )
    subprocess.run([str(venv / "bin/python"), "-I", "-c", program], cwd="/", check=True)
    assert (venv / "bin/datastore").exists()
    assert (venv / "bin/kubectl-datastore").exists()
