"""The network of a project for custom data: choose it, try it on the data, and time what will run.

Three kinds: linear heads on vectors; the same on images that a frozen, pretrained backbone turns into vectors; and
networks that are trained on images.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from salcli.data.decoding import Shape, decode
from salcli.data.sets import Samples
from salcli.engine.device import resolve_device
from salcli.engine.linear_heads import MOST_TO_CHOOSE_ON
from salcli.engine.linear_heads import SMALL as CROSS_VALIDATED
from salcli.errors import ModelError, ParamsError, SalError, WeightsError, printable
from salcli.models.backbones import (
    AUTO,
    LINEAR,
    OF_VECTORS,
    check_backbone_name,
    import_path,
    is_hooked,
    is_published,
    takes_vectors,
)
from salcli.models.custom import build_network, describe_failure, find_head, folder_of, make_importable
from salcli.models.network import Classifier, NetworkSpec, check_custom_head
from salcli.models.pretrained import (
    PRETRAINED,
    WITH_FILE,
    Embedder,
    Preprocessing,
    build_embedder,
    library_preprocessing,
    load_given,
    load_pretrained,
    preprocessing_of,
)
from salcli.progress import Silent
from salcli.project.cost import (
    SetSize,
    estimated_work,
    n_processes,
    n_separations,
    seconds_each,
    shown_time,
    start_up_seconds,
)
from salcli.project.custom_data import CustomData

SIZES = (8, 16, 28, 32, 64, 96, 128, 224)
SMALL, LARGE = 28, 64  # from SMALL on a deeper network pays, above LARGE one that begins with a stride
PRETRAINED_BACKBONE, FROM_SCRATCH = "torchvision:efficientnet_b0", "torchvision:resnet18"
# keys of params.yaml that build_embedder asks for, and the options of `init` that give them
OPTIONS = {
    "data.image_size": "--image-size", "model.mean": "--mean", "model.std": "--std", "model.head": "--head",
    "data.channels": "--set data.channels",
}  # fmt: skip
TIMED_BATCH = 32
# A fit of a linear head: passes over the data, and over those that its penalty is chosen on (cross-validated or not)
PASSES, PASSES_TO_CHOOSE = 35, {True: 1_000, False: 300}
PASSES_TO_SEPARATE, MOST_TIMED = 19_000, 20_000  # of a regression of wild against held-out ID data
DVC_SECONDS = 0.5  # for each stage, beside the start of its process


@dataclass(frozen=True)
class NetworkOptions:
    """What the user says about the network."""

    backbone: str | None = None
    head: str | None = None
    weights: str | None = None  # a file, or `pretrained`
    frozen: bool = False
    mean: list[float] | None = None  # for each channel, or one for all
    std: list[float] | None = None

    def completed(self, assigned: Mapping[str, Any]) -> "NetworkOptions":
        """With what --set says about the model."""
        texts = {key: getattr(self, key) or assigned.get(f"model.{key}") for key in ("backbone", "head", "weights")}
        texts = {key: text if isinstance(text, str) else None for key, text in texts.items()}
        return replace(self, **texts, frozen=self.frozen or assigned.get("model.frozen") is True)


@dataclass(frozen=True)
class Network:
    """A network that was tried and works, as params.yaml names it."""

    backbone: str
    why: str
    image_size: int | None = None  # None: vectors, or what a frozen backbone expects
    channels: int | None = None
    head: str | None = None  # None: salcli knows where it is
    code: str = "."
    weights: str | None = None
    is_trained: bool = False  # used without training
    starts_trained: bool = False  # all but the head, at least
    expected: Preprocessing | None = None  # by trained weights, as far as it is known
    mean: list[float] | None = None
    std: list[float] | None = None
    notes: tuple[str, ...] = ()
    embedder: Embedder | None = None  # of a frozen one

    @property
    def is_linear(self) -> bool:
        """Whether only linear heads are fitted, on vectors."""
        return self.embedder is not None or self.backbone == LINEAR

    @property
    def kind(self) -> str:
        return kind_of(self.image_size or 0)


def image_size(median_side: int) -> int:
    """The largest usual size that most images have, so that few are enlarged."""
    return max((size for size in SIZES if size <= median_side), default=SIZES[0])


def kind_of(size: int) -> str:
    """What networks for images of this size have in common."""
    return "small" if size < SMALL else "middle" if size <= LARGE else "large"


def as_written(path: Path, project: Path) -> str:
    """A path as params.yaml names it: relative inside the project, so that both can be moved; else absolute."""
    # not resolved: links may be there for a reason
    absolute, top = Path(os.path.abspath(path.expanduser())), Path(os.path.abspath(project))  # noqa: PTH100
    written = str(absolute.relative_to(top) if absolute.is_relative_to(top) else absolute)
    try:
        written.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(written).decode(errors="replace")
        raise SalError(
            f"the name of {shown} is not valid UTF-8, so params.yaml cannot hold it; rename it, or name a link to it "
            "(ln -s). The names of files inside it do not matter"
        ) from None
    return written


def channel_values(option: str, text: str | None) -> list[float] | None:
    """The value of --mean or --std: `0.5`, `0.485,0.456,0.406` or the same in brackets, as params.yaml has it."""
    if text is None:
        return None
    try:
        values = [float(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise ParamsError(f"{option} {text}: must be a number, or one per channel separated by commas") from None
    if max(values) > 1:
        on_scale = ",".join(f"{value / 255:.3g}" for value in values)
        raise ParamsError(f"{option} {text}: pixels go from 0 to 1 (did you mean {on_scale}?)")
    return values


# --- choosing and trying


class Bench:
    """Chooses the network for some data, tries it, and times what will run on this machine."""

    def __init__(self, data: CustomData, folder: Path, assigned: dict[str, Any], options: NetworkOptions) -> None:
        self.data, self.folder, self.assigned = data, folder, assigned
        self.options = options.completed(assigned)
        self.device = resolve_device(str(assigned.get("device", "auto")))
        self.n_classes = len(data.id.source.class_names)

    @property
    def has_gpu(self) -> bool:
        return self.device.type != "cpu"

    def network(self) -> Network:
        """What the user names, else what fits data and machine."""
        if self.data.is_vectors:
            return self._of_vectors()
        name = self.options.backbone
        if name is not None and takes_vectors(check_backbone_name(name)):
            raise SalError(f"--model {name} is for vectors; {self.data.id.where} holds images")
        try:
            if self.options.frozen:
                return self._frozen(name or PRETRAINED_BACKBONE, "as you named it" if name else "the usual one")
            if name is not None:
                return self._trained(name, "as you named it")
        except ModelError as error:
            message = str(error)
            for key, option in OPTIONS.items():
                message = message.replace(key, option)
            raise type(error)(message) from error
        assert self.data.id.look is not None
        if self.data.id.look.median_side <= LARGE or self.has_gpu:
            return self._trained(*self._by_size())
        try:
            return self._frozen(PRETRAINED_BACKBONE, "photos and no GPU: training takes far longer")
        except WeightsError as error:
            of_a_file = f"--model {PRETRAINED_BACKBONE} --frozen --weights FILE"
            scratch = Network(FROM_SCRATCH, "", image_size=image_size(self.data.id.look.median_side), channels=3)
            n, (seconds, _) = len(self.data.id.source), self._seconds_to_train(scratch, TIMED_BATCH)
            raise WeightsError(
                "these are photos, and there is no GPU: the plan is to embed them once with a frozen, pretrained "
                f"network, but {str(error).replace(WITH_FILE, of_a_file)}\n"
                "  or use another pretrained network: --model timm:NAME --frozen, or --model MODULE:NAME --weights "
                "FILE --frozen\n"
                f"  or train one from scratch: --model {FROM_SCRATCH}; an epoch of {n:,} images takes "
                f"{shown_time(n * seconds)} here, and it needs dozens of them and many images"
            ) from None

    def _of_vectors(self) -> Network:
        of_images = [name for name in ("frozen", "weights", "head", "mean", "std") if getattr(self.options, name)]
        of_images += ["image-size"] if self.assigned.get("data.image_size") is not None else []
        if of_images:
            raise SalError(f"--{of_images[0]} is for images; {self.data.id.where} holds vectors")
        name = self.options.backbone or LINEAR
        if not takes_vectors(check_backbone_name(name)):
            raise SalError(f"--model {name} takes images; for vectors use {' or '.join(OF_VECTORS)}")
        return Network(name, "vectors are features already" if name == LINEAR else "as you named it")

    def _by_size(self) -> tuple[str, str]:
        names = {"small": "small-cnn", "middle": "resnet18" if self.has_gpu else "wrn-16-2", "large": FROM_SCRATCH}
        return names[kind_of(self._image_size())], f"by the size of the images{' and the GPU' if self.has_gpu else ''}"

    def _image_size(self) -> int:
        assert self.data.id.look is not None
        return self._count("data.image_size") or image_size(self.data.id.look.median_side)

    def _channels(self) -> int:
        are_gray = all(one.look is not None and one.look.is_gray for one in self.data.sets)
        return self._count("data.channels") or (1 if are_gray else 3)

    def _count(self, key: str) -> int | None:
        value = self.assigned.get(key)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ParamsError(f"--set {key}={value}: must be a whole number of at least 1")
        return value

    def _code_folder(self, backbone: str) -> Path:
        """Where the module of a custom network is, which becomes importable."""
        parts = import_path(backbone)
        if parts is None:
            return self.folder
        given = Path(str(self.assigned.get("model.code", "."))).expanduser()
        folder = folder_of(parts[0], [self.folder / given, Path.cwd() / given, self.folder, Path.cwd()])
        if folder and "model.code" in self.assigned:
            self.assigned["model.code"] = as_written(folder, self.folder)  # people name it from where they are
        make_importable(folder or self.folder)
        return folder or self.folder

    def _weights(self, backbone: str) -> Path | Literal["pretrained"] | None:
        given = self.options.weights
        if given == PRETRAINED and not is_published(backbone):
            raise SalError(f"--weights pretrained is for torchvision: and timm:; name a file for {backbone}")
        return None if given is None else PRETRAINED if given == PRETRAINED else Path(given).expanduser()

    # frozen

    def _frozen(self, backbone: str, why: str) -> Network:
        check_backbone_name(backbone)
        code, weights = self._code_folder(backbone), self._weights(backbone)
        if weights is None and is_published(backbone):
            weights = PRETRAINED
        elif weights is None and not (import_path(backbone) and _trained_parts(backbone, None)[0]):
            raise SalError(
                f"--frozen needs trained weights, and those of {backbone} are random: name a file with --weights, or a "
                f"network whose weights are published, such as --model {PRETRAINED_BACKBONE}"
            )
        size, channels = self._count("data.image_size"), self._count("data.channels")
        given = self._given(code, weights, channels or 3)
        embedder = build_embedder(
            backbone, weights=weights, head=self.options.head, mean=given["mean"] or AUTO,
            std=given["std"] or AUTO, image_size=size, code_folder=code,
        )  # fmt: skip
        why = f"{why}; {_shown(weights)}"
        return Network(backbone, why, size, channels, head=embedder.spec.head, embedder=embedder, **given)

    def _given(self, code: Path, weights: Path | str | None, channels: int) -> dict[str, Any]:
        """What networks of images take from the options, as params.yaml has it."""
        values = {name: getattr(self.options, name) for name in ("mean", "std")}
        return {
            "code": as_written(code, self.folder),
            "weights": as_written(weights, self.folder) if isinstance(weights, Path) else weights,
            **{name: given and _per_channel(f"--{name}", given, channels) for name, given in values.items()},
        }

    # trained

    def _trained(self, backbone: str, why: str) -> Network:
        check_backbone_name(backbone)
        code, weights, notes = self._code_folder(backbone), self._weights(backbone), []
        size, channels = self._image_size(), self._channels()
        # gray images can also be given to a network as three equal channels
        possible = [1, 3] if channels == 1 and "data.channels" not in self.assigned else [channels]
        from_scratch = self.assigned.get("model.weights", "") is None
        if is_published(backbone) and weights in (None, PRETRAINED) and not from_scratch:
            try:
                usual = library_preprocessing(backbone)
                if usual is None:
                    raise WeightsError("none are published for it, or they expect what salcli does not offer")
                load_pretrained(backbone, usual.channels)
                weights = PRETRAINED
            except SalError as error:
                if weights == PRETRAINED:
                    raise
                notes.append(f"{backbone} is trained from scratch, because it has no pretrained weights here: {error}")
        is_custom = import_path(backbone) is not None
        starts_trained, has_head = _trained_parts(backbone, self.n_classes) if is_custom else (False, False)
        starts_trained |= weights is not None
        expected = library_preprocessing(backbone, weights)
        if is_custom:
            expected = preprocessing_of(build_network(backbone, possible[0], self.n_classes))
        if expected is not None:
            size, possible = self._count("data.image_size") or expected.crop, [expected.channels]
        head, channels = self._first_that_works(backbone, size, possible)
        classifier = self._classifier(backbone, channels, head)
        is_untouched = self.assigned.get("train_id.epochs") == 0
        if weights is not None:
            report = load_given(classifier, weights)
            has_head = report.head_was_loaded
            notes += [report.note] if report.note and weights != PRETRAINED else []
        elif is_untouched and has_head:
            check_custom_head(classifier)
        if is_untouched and not has_head:
            missing, way_out = "random weights", "name trained ones with --weights"
            if starts_trained:
                missing, way_out = "no such head", "add --frozen, which fits one on trained weights"
            raise ParamsError(
                f"--set train_id.epochs=0 is for a network with trained weights and a head for these {self.n_classes} "
                f"classes; {backbone} has {missing}: leave it out, or {way_out}"
            )
        is_trained = is_untouched or (weights not in (None, PRETRAINED) and has_head)
        how = ("with" if is_trained else "fine-tuned from") if starts_trained else "trained from scratch"
        why = f"{why}; {how} {_shown(weights)}" if starts_trained else f"{why}; {how}"
        if starts_trained and not is_trained and not self.has_gpu:
            notes.append("without a GPU, --frozen is much faster: each image goes through the network once")
        _run_once(classifier, channels, size)
        given = self._given(code, weights, channels)
        if is_custom and expected is not None:  # `auto` in params.yaml does not ask custom code
            given |= {name: given[name] or list(getattr(expected, name)) for name in ("mean", "std")}
        return Network(
            backbone, why, size, channels, head, is_trained=is_trained, starts_trained=starts_trained,
            expected=expected, notes=tuple(notes), **given,
        )  # fmt: skip

    def _first_that_works(self, backbone: str, size: int, possible: Sequence[int]) -> tuple[str | None, int]:
        """The head, and the first number of channels that the network takes."""
        *others, last = possible
        for channels in others:
            with suppress(ModelError):
                return self._head(backbone, channels, size), channels
        return self._head(backbone, last, size), last

    def _head(self, backbone: str, channels: int, size: int) -> str | None:
        head = self.options.head
        if is_hooked(backbone):
            return find_head(backbone, head, self.n_classes, (channels, size, size))
        if head is not None:
            raise ParamsError(f"--head is for custom networks and those of timm; {backbone} needs none")
        with torch.inference_mode():
            self._classifier(backbone, channels).eval()(torch.zeros(2, channels, size, size))
        return None

    def _classifier(self, backbone: str, n_inputs: int, head: str | None = None) -> Classifier:
        """With random weights; `n_inputs`: channels of images, or dimensions of vectors."""
        return Classifier(NetworkSpec(backbone, self.n_classes, (0.0,) * n_inputs, (1.0,) * n_inputs, head=head))

    # timing

    def seconds(self, params: Mapping[str, Any], network: Network) -> tuple[float, str]:
        """How long all stages take together, and what was measured."""
        sizes = {one.name: _size(self.data.without_copies(one)) for one in self.data.sets}
        start_ups = (n_processes(params) + 1) * (start_up_seconds() + DVC_SECONDS)  # one more: DVC itself
        if not network.is_linear:
            each, each_passed = self._seconds_to_train(network, params["train_id"]["batch_size"])
            work = estimated_work(params, sizes)
            seconds = work.n_trained * each + work.n_passed * each_passed
            return seconds + start_ups, f"{_rate(each)} {self.data.kind} a second in training"
        if network.embedder is None:
            return self._seconds_to_fit(self.data.id.n_dimensions, params, sizes) + start_ups, "fits of linear heads"
        each = self._seconds_to_embed(network.embedder)
        seconds = each * sum(size.n_images for size in sizes.values())
        seconds += self._seconds_to_fit(network.embedder.n_features, params, sizes)
        return seconds + start_ups, f"{_rate(each)} images a second, once; the rest takes seconds"

    def _seconds_to_embed(self, embedder: Embedder) -> float:
        """For one image, with reading it."""
        wanted, source = embedder.spec.preprocessing, self.data.id.source
        shape = Shape(wanted.channels, wanted.resize, wanted.interpolation, wanted.crop)
        embedder = embedder.to(self.device)

        def embed(n: int) -> None:
            for block in decode(source.take(np.arange(n)), shape, Silent(), skip_bad=True):
                embedder(torch.from_numpy(block.images).to(self.device)).sum().item()

        return seconds_each(embed, min(TIMED_BATCH, len(source)))

    def _seconds_to_train(self, network: Network, batch_size: int) -> tuple[float, float]:
        """For one sample, there and back; and for one without gradients."""
        size = network.image_size or 0
        shape = (network.channels or 0, size, size) if size else (self.data.id.n_dimensions,)
        classifier = self._classifier(network.backbone, shape[0], network.head).to(self.device)

        def samples(n: int) -> Tensor:
            return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, device=self.device)

        def train(n: int) -> None:
            loss = cross_entropy(classifier(samples(n)), torch.zeros(n, dtype=torch.int64, device=self.device))
            loss.backward()  # type: ignore[no-untyped-call]
            loss.item()

        def score(n: int) -> None:
            with torch.inference_mode():
                classifier(samples(n)).sum().item()

        there_and_back = seconds_each(train, batch_size)
        classifier.eval()
        return there_and_back, seconds_each(score, batch_size, budget=1.0)

    def _seconds_to_fit(self, n_dimensions: int, params: Mapping[str, Any], sizes: Mapping[str, SetSize]) -> float:
        """For all linear heads, and for regressions of wild against held-out ID data, where evaluations spend most."""
        data, n_id = params["data"], sizes[self.data.id.name].n_for_training
        n_train = round(float(data["id_shares"]["train"]) * n_id)
        n = min(n_train, MOST_TO_CHOOSE_ON)
        n_passes = PASSES * n_train / n + PASSES_TO_CHOOSE[n <= CROSS_VALIDATED]
        n_fits = len(params["seeds"]) * (1 + len(params["variants"]) * len(data["ood"]))
        seconds = n_fits * n_passes * _seconds_of_a_pass(n, n_dimensions, self.n_classes, self.device)
        own, share = data["calibration"], float(data["id_shares"]["calibration"])
        n_held_out = sizes[own].n_images if own else round(share * n_id)
        n = min(n_held_out + sizes[self.data.wild.name].n_images, MOST_TIMED)
        each = _seconds_of_a_pass(n, n_dimensions, 1, torch.device("cpu"))
        return seconds + n_separations(params) * PASSES_TO_SEPARATE * each


def _seconds_of_a_pass(n: int, n_dimensions: int, n_outputs: int, device: torch.device) -> float:
    """A linear layer and its softmax on n vectors, there and back: with many classes, the softmax takes longest."""
    vectors, weight = torch.ones(n, n_dimensions, device=device), torch.zeros(n_dimensions, n_outputs, device=device)

    def passes(times: int) -> None:
        for _ in range(times):
            logits = vectors @ weight
            (vectors.T @ logits.softmax(dim=1)).sum().item() + logits.log_softmax(dim=1).sum().item()

    return seconds_each(passes, 16, budget=0.5)


def _shown(weights: Path | str | None) -> str:
    if isinstance(weights, Path):
        return printable(weights.name)
    return "its published weights" if weights else "the weights that it comes with (the same each time)"


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.0f}" if seconds < 0.1 else f"{1 / seconds:.1f}"


def _size(source: Samples) -> SetSize:
    return SetSize(len(source), 0 if source.is_test is None else int(source.is_test.sum()))


def _trained_parts(backbone: str, n_classes: int | None) -> tuple[bool, bool]:
    """Whether custom code returns the same weights each time, which random ones are not: all but a head, and all."""
    first, second = (build_network(backbone, 3, n_classes).state_dict() for _ in range(2))
    is_same = {name: torch.equal(tensor, second[name]) for name, tensor in first.items()}
    random_layers = {name.rpartition(".")[0] for name, same in is_same.items() if not same}
    has_trained_layer = any(same and first[name].ndim > 1 for name, same in is_same.items())
    return has_trained_layer and len(random_layers) <= 1, not random_layers


def _run_once(classifier: Classifier, channels: int, size: int) -> None:
    try:
        with torch.inference_mode():
            classifier.eval()(torch.zeros(2, channels, size, size))
    except (ModelError, ParamsError):
        raise
    except Exception as error:  # custom code may raise anything
        raise ModelError(
            f"{classifier.spec.backbone} does not run without its head {classifier.spec.head}: "
            f"{describe_failure(error)}; its forward should only call that layer"
        ) from error


def _per_channel(option: str, values: list[float], channels: int) -> list[float]:
    if len(values) not in (1, channels):
        raise ParamsError(
            f"{option} has {len(values)} values, the images have {channels} channels; give as many, or one"
        )
    return values * channels if len(values) == 1 else values
