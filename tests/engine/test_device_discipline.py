"""Networks, passes and the SVD on fake CUDA tensors: no tensor is left on the CPU. Needs no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from salcli.engine.augmentation import Augmentation, Distortions
from salcli.models.network import NetworkSpec, OodClassifier
from salcli.sal.gradients import Factors, last_layer_residual, mean_gradient
from salcli.sal.spectrum import CentredGradients

CUDA = torch.device("cuda")


def is_on_gpu(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors)


@pytest.mark.parametrize(
    ("backbone", "shape"),
    [
        ("small-cnn", (1, 8, 8)),
        ("wrn-10-2", (3, 32, 32)),
        ("resnet18", (3, 32, 32)),
        ("torchvision:resnet18", (3, 64, 64)),
        ("mlp", (12,)),
        ("linear", (12,)),
    ],
)
def test_a_forward_pass_stays_on_the_device(backbone: str, shape: tuple[int, ...]) -> None:
    per_channel = (0.5,) * shape[0]
    network = OodClassifier(NetworkSpec(backbone, 4, per_channel, per_channel)).eval()
    real = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    with FakeTensorMode():
        weights = {name: torch.empty(one.shape, dtype=one.dtype, device=CUDA) for name, one in real.items()}
        assert is_on_gpu(*functional_call(network, weights, (torch.zeros(5, *shape, device=CUDA),)))


@pytest.mark.parametrize(
    "augment",
    [lambda draws: Augmentation("flip-crop", draws), lambda draws: Distortions(0.2, draws).cropped],
    ids=["flip and crop", "random crops"],
)
def test_augmentation_stays_on_the_device(augment: Callable[[torch.Generator], Callable[[Tensor], Tensor]]) -> None:
    change = augment(torch.Generator().manual_seed(0))
    with FakeTensorMode():
        assert is_on_gpu(change(torch.zeros(6, 3, 8, 8, device=CUDA)))


def test_every_product_with_the_gradients_stays_on_the_device() -> None:
    with FakeTensorMode():
        with CUDA:
            logits, feature, label = torch.zeros(20, 3), torch.zeros(20, 5), torch.zeros(20, dtype=torch.int64)
            V = torch.zeros(2, 3, 5, dtype=torch.float64)
        factors = Factors(last_layer_residual(logits, label), feature, label)
        G = CentredGradients(factors, mean_gradient(factors)[None])
        projection = G.project(V)
        assert is_on_gpu(projection, G.combine(projection), G.covariance_product(V), G.gram(), G.covariance())
