"""Random changes of images: flips, shifts, crops and colors of whole batches, on any device.

torchvision's transforms draw one crop and one set of color factors for a whole batch; here each image has its own.
All draws are made on the CPU, so the same seed gives the same images on every device.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from salcli.errors import SalError

SHIFT = 4  # pixels, in each direction

# random resized crops
ASPECT = (3 / 4, 4 / 3)  # width / height
N_TRIES = 10  # for a box that fits; then the whole image is taken

# color jitter
JITTER_SHARE = 0.8  # of the images change their colors …
GRAY_SHARE = 0.2  # … and of all images some become gray
STRENGTH = 0.4  # of brightness, contrast and saturation: factors from 0.6 to 1.4
HUE_TURN = 0.1  # of the color wheel, in each direction
LUMA = (0.2989, 0.587, 0.114)


class Augmentation:
    """The augmentation of supervised training: `none`, or `flip-crop` (random flip, then a shift of up to 4 pixels)."""

    def __init__(self, kind: str, generator: torch.Generator) -> None:
        self._kind, self._generator = kind, generator

    def __call__(self, images: Tensor, n_drawn: int | None = None, part: slice = slice(None)) -> Tensor:
        """Augmented images (n, C, H, W). With several processes each draws for all `n_drawn` and uses its part."""
        if self._kind == "none":
            return images
        if images.ndim != 4:
            shape = " × ".join(map(str, images.shape[1:]))
            raise SalError(f"augment: {self._kind} works on images, but these samples have the shape {shape}; use none")
        n = len(images) if n_drawn is None else n_drawn
        is_mirrored = torch.rand(n, generator=self._generator)[part] < 0.5
        shift = torch.randint(0, 2 * SHIFT + 1, (n, 2), generator=self._generator)[part]
        return mirror_and_shift(images, is_mirrored.to(images.device), shift.to(images.device))


def mirror_and_shift(images: Tensor, is_mirrored: Tensor, shift: Tensor) -> Tensor:
    """Mirror some images, then pad all with zeros and cut the original size out at `shift` (rows, columns)."""
    n, _, height, width = images.shape
    images = torch.where(is_mirrored[:, None, None, None], images.flip(3), images)
    padded = pad(images, (SHIFT,) * 4)
    rows = shift[:, :1] + torch.arange(height, device=images.device)  # n, H
    columns = shift[:, 1:] + torch.arange(width, device=images.device)  # n, W
    sample = torch.arange(n, device=images.device)[:, None, None]
    # channels last while indexing: each pixel is one contiguous piece of memory
    cut = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2)


class Distortions:
    """The random views that contrastive methods compare: crops with jittered colors (SimCLR)."""

    def __init__(self, smallest_crop: float, generator: torch.Generator) -> None:
        self._smallest_crop, self._generator = smallest_crop, generator

    def __call__(self, images: Tensor) -> Tensor:
        return self.recoloured(self.cropped(images))

    def mirrored(self, images: Tensor) -> Tensor:
        """Half of the images, left to right. Before any rotation: afterwards it would be another rotation."""
        is_mirrored = (self._uniform(len(images)) < 0.5).to(images.device)
        return torch.where(is_mirrored[:, None, None, None], images.flip(3), images)

    def cropped(self, images: Tensor) -> Tensor:
        return resized_crops(images, draw_boxes(len(images), images.shape[2], self._smallest_crop, self._generator))

    def recoloured(self, images: Tensor) -> Tensor:
        """Color jitter in a random order, then gray; images in [0, 255].

        Images that are not RGB have neither saturation nor hue, and count as gray already.
        """
        n, is_rgb = len(images), images.shape[1] == 3
        changes = (brightness, contrast, saturation, hue) if is_rgb else (brightness, contrast)
        is_jittered = self._uniform(n) < JITTER_SHARE
        order = self._uniform(n, len(changes)).argsort(dim=1)
        amount = 2 * self._uniform(n, len(changes)) - 1  # from −1 to 1
        is_gray = self._uniform(n) < GRAY_SHARE if is_rgb else torch.zeros(n, dtype=torch.bool)
        result = images.float() / 255
        for step in range(len(changes)):
            for kind, change in enumerate(changes):
                mine = (is_jittered & (order[:, step] == kind)).nonzero().squeeze(1)
                factor = HUE_TURN * amount[mine, kind] if change is hue else 1 + STRENGTH * amount[mine, kind]
                here = mine.to(images.device)
                result[here] = change(result[here], factor.to(images.device))
        gray = is_gray.to(images.device)[:, None, None, None]
        return 255 * torch.where(gray, grays(result), result)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator)


def draw_boxes(n: int, side: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Boxes (n × 4: top, left, height, width) in a square of `side` pixels, as RandomResizedCrop draws them.

    The area is uniform between the `smallest` share and the whole, the aspect log-uniform between 3:4 and 4:3.
    """
    area = torch.empty(n, N_TRIES, dtype=torch.float64).uniform_(smallest, 1, generator=generator) * side**2
    logs = math.log(ASPECT[0]), math.log(ASPECT[1])
    aspect = torch.empty(n, N_TRIES, dtype=torch.float64).uniform_(*logs, generator=generator).exp()
    size = torch.stack([(area / aspect).sqrt().round(), (area * aspect).sqrt().round()], dim=2)  # height, width
    fits = ((size >= 1) & (size <= side)).all(dim=2)
    first = fits.int().argmax(dim=1)
    chosen = torch.where(fits.any(dim=1)[:, None], size[torch.arange(n), first], float(side))
    corner = torch.rand(n, 2, dtype=torch.float64, generator=generator)  # below 1, so the box stays in the square
    return torch.cat([(corner * (side - chosen + 1)).floor(), chosen], dim=1).long()


def resized_crops(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image's own box (n × 4), resized to the whole image by bilinear interpolation; float32."""
    top, left, height, width = boxes.to(images.device).unbind(dim=1)
    resized = _resized_rows(images.float(), top, height)
    return _resized_rows(resized.transpose(2, 3), left, width).transpose(2, 3)


def _resized_rows(images: Tensor, start: Tensor, length: Tensor) -> Tensor:
    """`length` rows from `start` on, interpolated to as many rows as the image has."""
    n, _, n_rows, _ = images.shape
    position = (torch.arange(n_rows, device=images.device) + 0.5) * length[:, None] / n_rows - 0.5
    position = position.clamp(min=0).minimum(length[:, None] - 1.0)  # n, rows: pixels beside the crop do not count
    lower = position.floor()
    upper = (lower + 1).minimum(length[:, None] - 1.0)
    weight = (position - lower)[:, :, None, None]
    rows, sample = images.transpose(1, 2), torch.arange(n, device=images.device)[:, None]
    first, second = (rows[sample, (start[:, None] + part).long()] for part in (lower, upper))
    return torch.lerp(first, second, weight).transpose(1, 2)


# Colors: images are float (n, C, H, W) in [0, 1], each changed by its own factor.


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, torch.zeros_like(images), factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, grays(images).mean(dim=(1, 2, 3), keepdim=True), factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, grays(images), factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """All colors turned on the color wheel by a share of the whole circle."""
    red, green, blue = images.unbind(dim=1)
    value, low = images.amax(dim=1), images.amin(dim=1)
    chroma = value - low
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sector = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    turned = (sector + 6 * turn[:, None, None]) % 6  # of six sectors
    channels = []
    for offset in (5, 3, 1):
        position = (offset + turned) % 6
        channels.append(value - chroma * position.minimum(4 - position).clamp(0, 1))
    return torch.stack(channels, dim=1)


def grays(images: Tensor) -> Tensor:
    """Luminance (n, 1, H, W) of RGB images; other images as they are."""
    if images.shape[1] != 3:
        return images
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)


def _blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    share = factor[:, None, None, None]
    return (share * images + (1 - share) * other).clamp(0, 1)
