"""Shared fixtures. Shapes in annotations are checked while the tests run."""

from __future__ import annotations

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

install_import_hook(["salcli.sal", "salcli.rivals"], "beartype.beartype")

from salcli.artifacts.layout import Workspace  # noqa: E402
from salcli.params import Params, load_params  # noqa: E402

REPOSITORY = Path(__file__).parent.parent
OOD = "digits-8-9"
SEED = 0
# a pipeline of seconds: the same code on the same data, with fewer epochs
QUICK = {"seeds": [SEED], "rivals": [], "train_id.epochs": 8, "train_ood.epochs": 3}

# A shell starts background jobs with Ctrl-C ignored, and their children inherit it: its tests would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones first (with `--dist loadfile`, their files): nobody waits for the last process to end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def quick_params() -> Params:
    return load_params(REPOSITORY / "params.yaml", QUICK)[0]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, quick_params: Params) -> Path:
    """A workspace where every stage has run once, for one seed and both OOD sets. Read only: see `workspace`."""
    from ruamel.yaml import YAML

    from salcli.params_file import read_yaml, with_overrides
    from salcli.stages import detector, evaluate, extract_grads, prepare, train_id, train_ood
    from salcli.stages import filter as filter_stage

    root = tmp_path_factory.mktemp("built")
    with (root / "params.yaml").open("w") as file:
        YAML().dump(with_overrides(read_yaml(REPOSITORY / "params.yaml"), QUICK), file)
    workspace = Workspace(root)
    for name in (quick_params.data.id, *quick_params.data.ood):
        prepare.prepare_set(workspace, quick_params.data, name)
    prepare.prepare_split(workspace, quick_params.data, SEED)
    for ood in quick_params.data.ood:
        prepare.prepare_wild(workspace, quick_params.data, ood, SEED)
    train_id.run(workspace, quick_params, SEED)
    extract_grads.run_id(workspace, quick_params, SEED)
    for ood in quick_params.data.ood:
        extract_grads.run_wild(workspace, quick_params, ood, SEED)
        filter_stage.run(workspace, quick_params, ood, SEED)
        train_ood.run(workspace, quick_params, ood, SEED)
        evaluate.run(workspace, quick_params, ood, SEED)
        detector.run(workspace, quick_params, ood, SEED)
    return root


@pytest.fixture
def workspace(built: Path, tmp_path: Path) -> Workspace:
    """An own copy of the built workspace, free to be changed."""
    shutil.copytree(built, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")
