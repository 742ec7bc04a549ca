"""Networks on disk: safetensors with JSON metadata. Nothing is unpickled, equal weights are equal bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from salcli.artifacts.atomic import atomic_path
from salcli.errors import BadArtifactError, ModelError, UnknownNameError
from salcli.models.backbone_names import is_hooked
from salcli.models.contrastive import ContrastiveClassifier, RotationClassifier
from salcli.models.network import Classifier, EnergyClassifier, NetworkSpec, OodClassifier
from salcli.models.step import StepNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.artifacts.layout import Found

SCHEMA = 1
KINDS: dict[type[Classifier], str] = {
    Classifier: "classifier",
    OodClassifier: "ood-classifier",
    EnergyClassifier: "energy-classifier",
    ContrastiveClassifier: "contrastive-classifier",
    RotationClassifier: "rotation-classifier",
    StepNetwork: "step",
}
N = TypeVar("N", bound=Classifier)


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself."""

    kind: str
    schema: int
    spec: dict[str, Any]
    about: dict[str, Any]


def write_network(path: Path, network: Classifier, made_with: Mapping[str, Any]) -> None:
    """Store weights and what is needed to build the network again."""
    header = Header(KINDS[type(network)], SCHEMA, asdict(network.spec), dict(made_with))
    # copies, for a network may share weights between layers, which the library refuses
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    # one metadata entry: the library would write several in random order
    content = save(tensors, metadata={"salcli": json.dumps(asdict(header), sort_keys=True)})
    with atomic_path(path) as partial:
        partial.write_bytes(content)


def read_header(found: Found) -> Header:
    """The metadata alone."""
    try:
        with safe_open(found.path, framework="pt") as file:
            metadata = file.metadata() or {}
            header = Header(**json.loads(metadata["salcli"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise BadArtifactError(f"{found.path} is damaged or no salcli checkpoint ({error}); {found.cure}") from None
    if header.schema != SCHEMA:
        raise BadArtifactError(f"{found.path} has schema {header.schema}, this salcli reads {SCHEMA}; {found.cure}")
    return header


def read_network(found: Found, kind: type[N]) -> N:
    """Build the network and load its weights, ready for inference."""
    header = read_header(found)
    if header.kind != KINDS[kind]:
        raise BadArtifactError(f"{found.path} holds a network of kind {header.kind}, not {KINDS[kind]}; {found.cure}")
    try:
        network = kind(NetworkSpec.from_json(header.spec))
        with safe_open(found.path, framework="pt") as file:
            network.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except ModelError as error:
        if is_hooked(str(header.spec.get("backbone"))):  # it is the code that changed, not the file
            raise
        raise BadArtifactError(f"{found.path} does not fit its own description ({error}); {found.cure}") from None
    except (SafetensorError, UnknownNameError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise BadArtifactError(f"{found.path} does not fit its own description ({error}); {found.cure}") from None
    return network.eval()
