"""Images and figures in the forms that trackers take: tensors of bytes, and images of Pillow."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fnaccel.errors import ArgumentError


def as_pixels(images: object) -> list[torch.Tensor]:
    """One image or several as uint8 tensors (height, width, channels), channels 1, 3 or 4.

    Args:
        images: see `Media.log_images`.

    Raises:
        ArgumentError: other shapes or dtypes.

    Example:
        >>> from fnaccel.track.media import as_pixels
        >>> [image.shape for image in as_pixels(torch.rand(2, 3, 4, 5))]
        [torch.Size([4, 5, 3]), torch.Size([4, 5, 3])]
    """
    return list(_each(images))


def _each(images: object) -> Iterator[torch.Tensor]:
    if isinstance(images, Sequence):
        for image in images:
            yield from _each(image)
        return
    first = isinstance(images, torch.Tensor)  # channels come first in torch, and last elsewhere
    values = images.detach().cpu() if isinstance(images, torch.Tensor) else _from_array(images)
    shape = tuple(values.shape)
    if values.dim() == 2:
        values = values[..., None]
    elif first and values.dim() in (3, 4):
        values = values.movedim(-3, -1)
    if values.dim() not in (3, 4) or values.shape[-1] not in (1, 3, 4):
        raise ArgumentError(
            f"an image of shape {shape} has no 1, 3 or 4 channels",
            where="log_images",
            fix="a tensor (channels, height, width), an array (height, width, channels), or several of them",
        )
    values = _as_bytes(values)
    yield from values if values.dim() == 4 else (values,)


def _from_array(image: object) -> torch.Tensor:
    import numpy  # noqa: PLC0415 - optional: an image that is no tensor comes with it

    return torch.from_numpy(numpy.array(image))


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if values.is_floating_point():
        return (values.float().clamp(0, 1) * 255).round().to(torch.uint8)
    if values.dtype != torch.uint8:
        raise ArgumentError(
            f"pixels are {values.dtype}", where="log_images", fix="uint8, or floats from 0 to 1"
        )
    return values


def as_pictures(images: object) -> list[Any]:
    """One image or several as images of Pillow.

    Raises:
        ArgumentError: as `as_pixels`.
    """
    from PIL import Image  # noqa: PLC0415 - optional: libraries that show images bring it

    found = [pixels[..., 0] if pixels.shape[-1] == 1 else pixels for pixels in as_pixels(images)]
    return [Image.fromarray(pixels.contiguous().numpy()) for pixels in found]


def named_pictures(name: str, images: object) -> Iterator[tuple[str, Any]]:
    """The images of `as_pictures`, each with a name of its own: `digits/0` and so on, or `digits` for one."""
    pictures = as_pictures(images)
    for number, picture in enumerate(pictures):
        yield (name if len(pictures) == 1 else f"{name}/{number}"), picture


def as_picture(figure: Any) -> Any:
    """A figure of matplotlib as an image of Pillow."""
    from PIL import Image  # noqa: PLC0415 - optional: libraries that show images bring it

    written = io.BytesIO()
    figure.savefig(written, format="png")
    written.seek(0)
    picture = Image.open(written)
    picture.load()
    return picture
