"""extract-grads: what is stored is what the network says of each sample, in any batch size."""

import numpy as np
import torch
from helpers.quick import EXPERIMENT
from helpers.stages import params_of, stored, written

from salcli.params.schema import Params
from salcli.pipeline import extract
from salcli.pipeline.loading import classifier, id_samples, ood_test_samples, wild_samples
from salcli.sal.gradients import Gradients
from salcli.store.formats import RepresentationFile
from salcli.store.layout import Artifact, Workspace


def test_features_and_logits_are_those_of_the_network_with_true_labels_for_id_and_predicted_ones_for_wild_data(
    workspace: Workspace, quick_params: Params
) -> None:
    network = classifier(workspace, EXPERIMENT)

    def check(artifact: Artifact, images: torch.Tensor, labels: torch.Tensor | None) -> None:
        content = stored(workspace, artifact)
        with torch.inference_mode():
            features, logits = network.features_and_logits(images)
        np.testing.assert_allclose(content["feature"], features, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(content["logits"], logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(content["predicted"], content["logits"].argmax(1))
        np.testing.assert_array_equal(content["label"], content["predicted"] if labels is None else labels)

    for part in ("train", "calibration", "test"):
        samples = id_samples(workspace, quick_params, part, EXPERIMENT)
        check(EXPERIMENT.id_representation(part), samples.rows.read(slice(None)), samples.labels)
    wild, test = (read(workspace, quick_params, EXPERIMENT) for read in (wild_samples, ood_test_samples))
    check(EXPERIMENT.wild_representation, wild.read(slice(None)), None)
    check(EXPERIMENT.test_representation(), test.read(slice(None)), None)


def test_the_factors_of_a_file_are_the_gradients_of_autograd(workspace: Workspace, quick_params: Params) -> None:
    """One backward pass per sample through the last layer (Eq. 4)."""
    network = classifier(workspace, EXPERIMENT)
    samples, rows = id_samples(workspace, quick_params, "train", EXPERIMENT), torch.arange(12)
    file = RepresentationFile.open(workspace.find(EXPERIMENT.id_representation("train")))
    (factors,) = Gradients(file.take(rows), file.label[rows]).chunks()
    for image, label, found in zip(samples.rows.read(slice(0, 12)), samples.labels, factors.dense(), strict=False):
        network.zero_grad()
        torch.nn.functional.cross_entropy(network(image[None]), label[None]).backward()
        expected = network.head.weight.grad.flatten()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max() + 1))


def test_a_second_run_gives_the_same_bytes_and_other_batches_the_same_numbers(
    workspace: Workspace, quick_params: Params
) -> None:
    artifacts = [EXPERIMENT.wild_representation, EXPERIMENT.test_representation()]
    before, numbers = written(workspace, *artifacts), stored(workspace, artifacts[0])
    done = extract.run_wild(workspace, quick_params, EXPERIMENT)
    assert written(workspace, *artifacts) == before
    assert [one.n_samples for one in done] == [642, 0, 106]  # wild, held out, OOD test
    extract.run_wild(workspace, params_of(workspace, {"extract_grads.batch_size": 50}), EXPERIMENT)
    for name, values in stored(workspace, artifacts[0]).items():
        np.testing.assert_allclose(values, numbers[name], rtol=1e-4, atol=1e-5)
