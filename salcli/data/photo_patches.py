"""8×8 gray patches of the two photographs that come with scikit-learn: far OOD for digits."""

from __future__ import annotations

import numpy as np

from salcli.data.image_set import ImageSet

N_PATCHES = 2_000
SIDES = (16, 96)  # pixels of the photograph
SIZE = 8
# Patches of one photograph overlap. So wild patches come from the left part and test patches from
# the right part only: no pixel is seen in both.
WILD_PART = 0.7
LUMA = np.array([0.299, 0.587, 0.114])


def load_photo_patches() -> ImageSet:
    """Squares of random size and place, averaged down to 8×8. The same each time."""
    from sklearn.datasets import load_sample_images

    photographs = [photo @ LUMA for photo in load_sample_images().images]
    rng = np.random.default_rng(20240116)
    for_wild = np.arange(N_PATCHES) < WILD_PART * N_PATCHES
    patches = [_patch(photographs[i % len(photographs)], rng, left=bool(for_wild[i])) for i in range(N_PATCHES)]
    return ImageSet(np.stack(patches)[:, None], is_test=~for_wild)


def _patch(photo: np.ndarray, rng: np.random.Generator, *, left: bool) -> np.ndarray:
    height, width = photo.shape
    border = int(width * WILD_PART)
    first, last = (0, border) if left else (border, width)
    side = int(rng.integers(SIDES[0], SIDES[1] + 1))
    top = int(rng.integers(0, height - side + 1))
    column = int(rng.integers(first, last - side + 1))
    return _shrink(photo[top : top + side, column : column + side])


def _shrink(square: np.ndarray) -> np.ndarray:
    """Mean over equal areas, also where the side is no multiple of 8."""
    weight = _area_weights(len(square))
    small: np.ndarray = np.rint(weight @ square @ weight.T).astype(np.uint8)
    return small


def _area_weights(side: int) -> np.ndarray:
    """Row i: how much each of `side` pixels counts in the i-th of 8 equal parts."""
    edges = np.arange(SIZE + 1)[:, None] * side / SIZE
    covered = np.clip(edges - np.arange(side)[None], 0, 1)  # of each pixel, left of each edge
    share: np.ndarray = np.diff(covered, axis=0) * SIZE / side
    return share
