"""Shared fixtures. Shapes in annotations are checked while the tests run."""

import os

# Many small matrices in several processes: threads would only wait for each other. Set before torch is loaded.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Some virtual machines announce AMX and do not allow it: bfloat16 would end in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook(["salcli.sal", "salcli.methods", "salcli.models"], "beartype.beartype")

from helpers.quick import EXPERIMENT, QUICK, REPOSITORY  # noqa: E402

from salcli.params.schema import Params, load_params  # noqa: E402
from salcli.store.layout import Workspace  # noqa: E402

# A shell starts background jobs with Ctrl-C ignored, and their children inherit it: its tests would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no process waits for the last one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def quick_params() -> Params:
    return load_params(REPOSITORY / "params.yaml", QUICK)[0]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, quick_params: Params) -> Path:
    """A project where every stage has run once, for one seed and both OOD sets. Read only: see `workspace`."""
    from helpers.stages import run_every_stage

    from salcli.params.reading import edited

    root = tmp_path_factory.mktemp("built")
    (root / "params.yaml").write_text(edited((REPOSITORY / "params.yaml").read_text(), QUICK))
    run_every_stage(Workspace(root), quick_params)
    return root


@pytest.fixture
def workspace(built: Path, tmp_path: Path) -> Workspace:
    """A copy of the built project, free to be changed."""
    return Workspace(shutil.copytree(built, tmp_path / "workspace"))


@pytest.fixture(scope="session")
def evaluated(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy for reports, with one experiment, two methods and the theory. Read only."""
    from salcli.params.reading import edited
    from salcli.pipeline import evaluate, theory

    root = shutil.copytree(built, tmp_path_factory.mktemp("evaluated") / "project")
    few = {"data.ood": [EXPERIMENT.ood], "evaluate.methods": ["sal", "msp"]}
    (root / "params.yaml").write_text(edited((root / "params.yaml").read_text(), few))
    params = load_params(root / "params.yaml")[0]
    evaluate.run(Workspace(root), params, EXPERIMENT)
    theory.run(Workspace(root), params, EXPERIMENT)
    return root
