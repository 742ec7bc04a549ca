"""The command behind the pipeline's first stage."""

from __future__ import annotations

from pathlib import Path

from salcli.cli.options import PARAMS_YAML, ParamsFile


def fingerprints(params: ParamsFile = PARAMS_YAML) -> None:
    """Write down what DVC cannot see, so that it notices a change: code, raw data, given weights, own networks."""
    import json

    from salcli.artifacts.atomic import write_text
    from salcli.artifacts.fingerprint import fingerprint_of_file, fingerprint_of_listing
    from salcli.artifacts.layout import Workspace, outside_fingerprints
    from salcli.data.loading import read_from
    from salcli.data.own_sets import read_from_own
    from salcli.data.root import data_root, own_place
    from salcli.models.own_code import code_fingerprint
    from salcli.params import load_params
    from salcli.source import stage_fingerprints

    workspace, (chosen, _) = Workspace(params.parent), load_params(params)
    data, weights = chosen.data, chosen.train_id.weights
    root = data_root(params_root=data.root, workspace=workspace.root)

    def files_of(name: str) -> list[Path]:
        if name in data.own:
            return read_from_own(name, own_place(data.own[name], workspace.root))
        return read_from(name, root)

    content = {
        "code": stage_fingerprints(),
        "data": {name: fingerprint_of_listing(files_of(name)) for name in (data.id, *data.ood, *data.test_ood)},
        "weights": fingerprint_of_file(workspace.given(weights)) if weights else "",
        "network": code_fingerprint(chosen.model.backbone, workspace.given(chosen.model.code)),
    }
    write_text(workspace.target(outside_fingerprints()), json.dumps(content, indent=2) + "\n")
