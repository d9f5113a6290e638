"""Ready to publish: what stands in several files of the repository agrees."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
yaml = pytest.importorskip("yaml")
SETTINGS = [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


def pyproject(root: Path = ROOT) -> dict:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is newer")
    import tomllib

    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.name)
def test_every_file_of_settings_can_be_read(path):
    assert yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_tested_versions_of_python_are_those_that_are_promised():
    promised = [each.rpartition(" ")[2] for each in pyproject()["project"]["classifiers"] if re.search(r":: 3\.\d+$", each)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == promised
    assert pyproject()["project"]["requires-python"] == f">={promised[0]}"
    (lowest,) = (step["with"]["python-version"] for step in jobs["lowest"]["steps"] if "with" in step)
    assert lowest == promised[0]


def test_published_links_lead_to_files_of_the_repository(tmp_path):
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    page = "https://example.org/owner/name"
    runpy.run_path(str(ROOT / ".ci/absolute_links.py"))["main"](page, "v1", tmp_path)
    targets = re.findall(r"\]\(([^)]+)\)", (tmp_path / "README.md").read_text(encoding="utf-8"))
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    ours = [target.partition("/v1/")[2].partition("#")[0] for target in targets if target.startswith(page)]
    assert [target for target in ours if not (ROOT / target).exists()] == []
    assert f"{page}/raw/v1/docs/figures/readme-handover.png" in targets
    assert pyproject(tmp_path)["project"]["urls"] | {"Source": page} == pyproject(tmp_path)["project"]["urls"]
