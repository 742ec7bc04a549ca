"""Write salcli/presets/*.yaml: params.yaml with the values of each table of the paper, comments included.

Run it after a change to params.yaml or to the values below: `python tools/make_presets.py`. A test holds the files
equal to what it writes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from salcli.method_names import Encoder, WildRival  # noqa: E402
from salcli.paper import figures  # noqa: E402
from salcli.params_file import edited  # noqa: E402
from salcli.reporting.results_table import LABELS  # noqa: E402

FOLDER = REPOSITORY / "salcli" / "presets"
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]  # in the order of the paper's tables
FIVE_SEEDS = [0, 1, 2, 3, 4]

# Section 5.1 and Appendix G; 25,000 labeled images, a tenth of which is held out for the filter's threshold
PROTOCOL: dict[str, Any] = {
    "seeds": [0],
    "data.id": "cifar100",
    "data.ood": FIVE_SETS,
    "data.image_size": 32,
    "data.channels": 3,
    "data.id_shares.train": 0.45,
    "data.id_shares.calibration": 0.05,
    "data.id_shares.wild": 0.5,
    "data.id_shares.test": "official",
    "model.backbone": "wrn-40-2",
    "model.drop_rate": 0.3,
    "model.mean": [0.491373, 0.482353, 0.446667],  # [125.3, 123.0, 113.9] / 255
    "model.std": [0.247059, 0.243529, 0.261569],  # [63.0, 62.1, 66.7] / 255
    "train_id.epochs": 100,
    "train_id.batch_size": 128,
    "train_id.augment": "flip-crop",
    "train_ood.epochs": 100,
    "train_ood.batch_size": 128,
    "train_ood.lr": 0.001,
    "train_ood.augment": "flip-crop",
    "train_rival.energy-oe.m_in": -27,
    "train_rival.energy-oe.m_out": -5,
    "train_rival.scone.margin": -10,
    "evaluate.knn_k": 200,
}
CIFAR10 = {"data.id": "cifar10", "train_rival.energy-oe.m_in": -23, "evaluate.knn_k": 50}
# three Gaussians and an MLP; the numbers of the authors' code
PLANE: dict[str, Any] = {
    "seeds": [0],
    "data.id": "gaussians-2d",
    "data.ood": ["ring-2d", "cluster-2d"],
    "data.image_size": 1,
    "data.channels": 2,
    "data.id_shares.train": 0.2,
    "data.id_shares.calibration": 0.2,
    "data.id_shares.wild": 0.6,
    "data.id_shares.test": "official",
    "model.backbone": "mlp",
    "model.mean": [0.0, 0.0],  # points as they are: the scaling of images, by 255, is undone
    "model.std": [0.003922, 0.003922],
    "train_id.epochs": 3,
    "train_id.lr": 0.01,
    "train_id.momentum": 0.0,  # with 0.9, the weight decay leaves a network that guesses
    "train_id.weight_decay": 0.4,
    "train_ood.epochs": 3,
}


@dataclass(frozen=True)
class Recipe:
    """What makes a preset differ from params.yaml, and what its first lines say."""

    title: str
    paper: str
    note: str
    values: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: PROTOCOL)


RECIPES = {
    "main-cifar100": Recipe(
        "CIFAR-100, five OOD sets",
        "Table 1, Section 5.2",
        "the paper averages over 10 runs; five seeds are half the work and show the spread. For all ten: "
        "`salcli init --set seeds=[0,1,2,3,4,5,6,7,8,9]`.",
        {"seeds": FIVE_SEEDS},
    ),
    "cifar10": Recipe(
        "CIFAR-10, five OOD sets",
        "Table 7, Appendix H",
        "the paper averages over 10 runs; five seeds are half the work and show the spread. For all ten: "
        "`salcli init --set seeds=[0,1,2,3,4,5,6,7,8,9]`.",
        {**CIFAR10, "seeds": FIVE_SEEDS},
    ),
    "gradnorm-filter": Recipe(
        "GradNorm as the filter score",
        "Table 2, Section 5.2",
        "filter.score is gradnorm; the row it is compared with is main-cifar100. Both: "
        "`dvc exp run --queue -S filter.score=sal,gradnorm`.",
        {"filter.score": "gradnorm"},
    ),
    "class-agnostic-svd": Recipe(
        "one SVD for all classes",
        "Table 12, Appendix L",
        "filter.svd is class-agnostic, the reference gradient stays class-conditional as the paper says. Both: "
        "`dvc exp run --queue -S filter.svd=class-conditional,class-agnostic`.",
        {"filter.svd": "class-agnostic"},
    ),
    "global-reference": Recipe(
        "one reference gradient, one SVD",
        "Section 3.1, Equations 4–6",
        "the equations of the main text as they stand, without Remark 2: filter.reference is global, filter.svd is "
        "class-agnostic. The paper has no table for it.",
        {"filter.reference": "global", "filter.svd": "class-agnostic"},
    ),
    "post-hoc-cifar10": Recipe(
        "the filter score on test data",
        "Table 13, Appendix M",
        "no OOD classifier is needed for the post-hoc row, but its rival, SAL, trains one.",
        CIFAR10,
    ),
    "post-hoc-cifar100": Recipe(
        "the filter score on test data",
        "Table 14, Appendix M",
        "no OOD classifier is needed for the post-hoc row, but its rival, SAL, trains one.",
    ),
    "candidate-id": Recipe(
        "training with candidate ID data",
        "Table 15, Appendix N",
        "train_ood.candidate_id is true. Both: `dvc exp run --queue -S train_ood.candidate_id=false,true`.",
        {"train_ood.candidate_id": True},
    ),
    "random-labels": Recipe(
        "random labels in the filter",
        "Table 16, Appendix O",
        "filter.labels is random. Both: `dvc exp run --queue -S filter.labels=predicted,random`.",
        {"filter.labels": "random"},
    ),
    "resnet18": Recipe(
        "ResNet-18 as the network",
        "Table 19, Appendix U",
        "the paper names no other training details, so they are those of Appendix G; dropout is for a wrn alone.",
        {"model.backbone": "resnet18", "model.drop_rate": 0.0},
    ),
    "resnet34": Recipe(
        "ResNet-34 as the network",
        "Table 20, Appendix U",
        "the paper names no other training details, so they are those of Appendix G; dropout is for a wrn alone.",
        {"model.backbone": "resnet34", "model.drop_rate": 0.0},
    ),
    "mixing-ratio": Recipe(
        "other shares π of OOD data",
        "Table 17, Appendix S",
        "SAL for every π, with a figure: `dvc repro`, then `salcli sweep-pi`. The whole table, with the rivals: "
        "`dvc exp run --queue -S data.pi=0.05,0.2,0.5,0.9`, then `dvc queue start`.",
        {"data.pi": 0.05},
    ),
    "unseen-300k": Recipe(
        "unseen OOD, 300K Random wild",
        "Table 8, Appendix I",
        "the caption says 50 epochs, other than elsewhere; here the OOD classifier is trained for 50, on top of "
        "the ID classifier of the other tables.",
        {
            **CIFAR10,
            "data.ood": ["300k-random"],
            "data.test_ood": FIVE_SETS,
            "data.ood_wild_share": 0.99,
            "train_ood.epochs": 50,
        },
    ),
    "unseen-tin": Recipe(
        "unseen OOD, Tiny-ImageNet",
        "Table 9, Appendix I",
        "what is wild in one experiment is the test of the other. The paper follows another one's setting and names "
        "no π: 0.1 is the default of its other tables.",
        {"data.ood": ["tin-crop", "tin-resize"], "data.test_ood": ["tin-crop", "tin-resize"]},
    ),
    "near-cifar100": Recipe(
        "near OOD: CIFAR-100",
        "Appendix J (in the text)",
        "CIFAR-100's train split is in the wild, its test split is the test.",
        {**CIFAR10, "data.ood": ["cifar100"]},
    ),
    "near-cifar50": Recipe(
        "near OOD: half the classes",
        "Table 10, Appendix J",
        "the first 50 classes are ID, the last 50 are OOD; how the paper splits them is not said, so as elsewhere.",
        {"data.id": "cifar100-first50", "data.ood": ["cifar100-last50"]},
    ),
    "singular-vectors": Recipe(
        "one to six singular vectors",
        "Table 11, Appendix K",
        "the whole table: `dvc exp run --queue -S filter.n_vectors=1,2,3,4,5,6`, then `dvc queue start`; the ID "
        "classifier is trained once.",
        {"data.ood": ["textures"]},
    ),
    "theory": Recipe(
        "ζ and filter errors by π",
        "Tables 5–6, Appendix F",
        "the whole table: `dvc repro`, then `salcli sweep-pi` has ζ, ERR_in, ERR_out and FPR95 for every π, as a table "
        "and a figure; the ID classifier is trained once.",
        {"data.ood": ["textures"]},
    ),
    "predicted-labels": Recipe(
        "errors of the filter",
        "Section 4.1, Appendix P",
        "both ID sets: `dvc exp run --queue -S data.id=cifar10,cifar100`, then `dvc queue start`; "
        "`dvc metrics show` has ERR_in and ERR_out.",
        {"data.ood": ["textures"]},
    ),
    "toy": Recipe(
        "three Gaussians in a plane",
        "Figure 2, Appendix Q",
        "no download and no GPU; the paper reports ERR_in alone: `dvc metrics show`. The numbers of the training "
        "are those of the authors' code.",
        base=PLANE,
    ),
    "weakly-supervised": Recipe(
        "beside STEP and TSL",
        "Table 18, Appendix T",
        "the paper «strictly follows» the setting of TSL and says neither π nor the number of labeled images: both "
        "are those of its other tables here, so the figures need not agree.",
        {"data.ood": ["lsun-c", "lsun-r"]},
    ),
}


def texts() -> dict[str, str]:
    """Every preset's file: name → text."""
    base = (REPOSITORY / "params.yaml").read_text(encoding="utf-8")
    return {"default": base} | {
        name: _header(name, recipe) + edited(base, recipe.base | _methods(name) | recipe.values)
        for name, recipe in RECIPES.items()
    }


def _methods(table: str) -> dict[str, list[str]]:
    """The rows of a table that we can compute; a variant of SAL is SAL with other params."""
    rows = {figure.method for figure in figures() if figure.setting.table == table}
    methods = [method for method, label in LABELS.items() if label in rows or method == "sal"]
    return {
        "rivals": [method for method in methods if method in get_args(WildRival)],
        "encoders": [method for method in methods if method in get_args(Encoder)],
        "evaluate.methods": methods,
    }


def _header(name: str, recipe: Recipe) -> str:
    note = wrap(f"Note: {recipe.note}", width=110, break_long_words=False, break_on_hyphens=False)
    lines = [f"{name}: {recipe.title}", f"Paper: {recipe.paper} (Du et al., ICLR 2024)", *note, ""]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def main() -> None:
    """Write them all."""
    for name, text in texts().items():
        (FOLDER / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
