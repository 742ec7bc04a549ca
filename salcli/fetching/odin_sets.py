"""The sets that the authors of ODIN cut or scaled and share on Dropbox, which is their only home.

Addresses and checksums: pytorch_ood.dataset.img.odin. It lacks iSUN: that address is from the authors' README, and its
checksum from other public code whose checksum of LSUN_resize.tar.gz agrees with pytorch_ood's.
"""

from __future__ import annotations

from salcli.fetching.data_source import NOT_STATED, DataSource, named_file


def _odin(name: str, title: str, n_images: int, folder: str, share: str, md5: str) -> DataSource:
    return DataSource(
        name,
        title,
        "ood",
        n_images,
        "32×32",
        NOT_STATED,
        "https://github.com/facebookresearch/odin",
        (named_file(f"https://www.dropbox.com/s/raw/{share}/", f"{folder}.tar.gz", md5),),
        provides=(folder,),
    )


ODIN_SETS = (
    _odin("lsun-c", "LSUN, cropped", 10_000, "LSUN", "fhtsw1m3qxlwj6h", "458a0a0ab8e5f1cb4516d7400568e460"),
    _odin("lsun-r", "LSUN, resized", 10_000, "LSUN_resize", "moqh2wh8696c3yl", "278b7b31c8cb7e804a1465a8ce03a2dc"),
    _odin("isun", "iSUN", 8_925, "iSUN", "ssz7qxfqae0cca5", "be77b0f2c26fda898afac5f99645ee70"),
    _odin(
        "tin-crop", "Tiny ImageNet, cropped", 10_000, "Imagenet", "avgm2u562itwpkl", "7c0827e4246c3718a5ee076e999e52e5"
    ),
    _odin(
        "tin-resize",
        "Tiny ImageNet, resized",
        10_000,
        "Imagenet_resize",
        "kp3my3412u5k9rl",
        "0f9ff11d45babf2eff5fe12281d1ac31",
    ),
)
