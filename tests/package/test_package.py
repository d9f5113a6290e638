"""The package as a user gets it: a wheel with two dependencies, quick and clean to import."""

import email
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", out, ROOT)
    return next(out.glob("*.whl"))


@pytest.mark.processes
def test_the_wheel_and_the_sdist_pass_twine(wheel):
    files = [str(path) for path in wheel.parent.iterdir()]
    assert len(files) == 2
    run_python("-m", "twine", "check", "--strict", *files)


@pytest.mark.processes
def test_the_sdist_has_every_file_of_the_repository(wheel):
    """So that `make test` runs from it."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()} <= packed


@pytest.mark.processes
def test_the_core_needs_torch_and_safetensors_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_string(
            archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
        )
        for shipped in (
            "py.typed",
            "lab/report/page.html",
            "lab/report/page.js",
            "reporting/shell.html",
            "reporting/shell.css",
        ):
            assert f"segue/{shipped}" in archive.namelist()
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == ["safetensors", "torch"]
    assert metadata["License-Expression"] == "Apache-2.0"


CORE_ALONE = """
import sys, warnings
for name in "numpy timm transformers sklearn matplotlib torchvision accelerate tqdm typer rich ray".split():
    sys.modules[name] = None
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's own words
import torch, segue
model, fresh = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)) for _ in range(2))
handover = segue.replace_(model, segue.methods.dcr_dfg(sites="0"), total_steps=2)
optimizer = torch.optim.AdamW(handover.parameters())
x = torch.randn(3, 4)
handover.verify(x, optimizer=optimizer)
for _ in range(2):
    (model(x).sum() + handover.aux_loss()).backward()
    optimizer.step()
    handover.step()
    segue.save(handover, sys.argv[1] + "/run", optimizer=optimizer)
segue.save(handover.finalize_(), sys.argv[1] + "/model")
assert torch.equal(segue.load_(fresh, sys.argv[1] + "/model")(x), model(x))
try:
    segue.fit(fresh, None, [x], lambda model, batch: model(batch).sum(), recipe=segue.Recipe(steps=1))
except segue.errors.MissingExtraError as error:
    assert "pip install segue[train]" in str(error)
else:
    raise AssertionError("fit needs Accelerate")
"""


@pytest.mark.processes
def test_the_core_works_with_torch_alone(tmp_path):
    run_python("-W", "error", "-c", CORE_ALONE, tmp_path)


def test_public_names_exist():
    import segue

    assert all(hasattr(segue, name) for name in segue.__all__)


def test_no_path_or_host_of_one_machine_is_in_the_repository():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    places = [f"/{name}/" for name in ("work", "farm", "root")]
    for name in tracked.stdout.split():
        if (ROOT / name).suffix in (".py", ".md", ".toml", ".yml", ".txt", ".json"):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not any(place in text for place in places), name


@pytest.mark.processes
def test_dir_lists_the_public_names_and_nothing_else():
    code = "import segue, segue.cli, segue.core.seam; assert dir(segue) == sorted(segue.__all__), dir(segue)"
    run_python("-c", code)
