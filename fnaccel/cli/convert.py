"""`fnaccel convert`: converts a checkpoint between tools, without a model and without ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

from tqdm import tqdm

from fnaccel.checkpoint.disk import placing
from fnaccel.checkpoint.format.found import Source
from fnaccel.checkpoint.format.items import Item
from fnaccel.checkpoint.format.safetensors import Progress, write_items
from fnaccel.cli.options.convert import parser
from fnaccel.cli.terminal import print_json
from fnaccel.errors import ArgumentError, CheckpointError
from fnaccel.interchange.converting import own_items, write_own
from fnaccel.interchange.exporting import Style, export_source, items_of
from fnaccel.interchange.sources.detect import opened

_WHERE = "fnaccel convert"


def run(arguments: Sequence[str]) -> int:
    """Convert a file or a checkpoint, with a progress bar.

    Raises:
        FnaccelError: SOURCE can't be read in this format, or TARGET exists.

    Example:
        >>> path = fa.save("runs/gpt", state)
        >>> run(["runs/gpt", "exported", "--dtype", "bf16"])
        fnaccel -> hf: exported
        0
    """
    options = parser().parse_args(arguments)
    style = Style(
        max_shard_size=options.max_shard_size,
        dtype=options.dtype,
        ema=options.ema,
        model=options.model,
        only=options.only,
        skip=options.skip,
        rename=_pairs(options.rename),
        where=_WHERE,
    )
    try:
        with opened(options.source, options.form, trust=options.trust_pickle, step=options.step) as source:
            to = options.to or ("hf" if source.format == "fnaccel" else "fnaccel")
            path = _convert(source, options.target, to, style, overwrite=options.overwrite)
    except OSError as error:
        raise CheckpointError(
            f"{error.strerror or error} ({error.filename or options.target})",
            where=_WHERE,
            fix="give paths that can be read and written, on a device with free space",
        ) from error
    if options.json:
        print_json({"from": source.format, "to": to, "path": str(path)})
    else:
        print(f"{source.format} -> {to}: {path}")
    return 0


def _convert(source: Source, target: Path, to: str, style: Style, *, overwrite: bool) -> Path:
    if to == "fnaccel":
        with _bar(own_items(source, style)) as progress:
            return write_own(target, source, style, progress=progress)
    items = items_of(source, style)
    place = placing.check_free(target, overwrite=overwrite, where=style.where, file=to == "safetensors")
    with _bar(items) as progress:
        if to == "hf":
            export_source(target, source, style, overwrite=overwrite, progress=progress)
        else:
            _one_file(place, source, items, progress)
    return target


def _one_file(target: Path, source: Source, items: Sequence[Item], progress: Progress) -> None:
    staged = placing.stage(target)
    try:
        source.verify(0, 1)
        # widest dtype first, so that each tensor starts at a multiple of its element size
        write_items(staged / target.name, sorted(items, key=lambda item: -item.dtype.itemsize), progress)
        source.check_unchanged()
        placing.commit_file(staged / target.name, target)
    finally:
        placing.discard(staged)


@contextlib.contextmanager
def _bar(items: Sequence[Item]) -> Generator[Progress]:
    total = sum(item.nbytes for item in items)
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1000, leave=False) as bar:

        def progress(count: int) -> None:
            bar.update(count)

        yield progress


def _pairs(rules: Sequence[str]) -> dict[str, str] | None:
    renames: dict[str, str] = {}
    for rule in rules:
        pattern, equals, to = rule.partition("=")
        if not equals or not pattern:
            raise ArgumentError(
                f"{rule!r} renames nothing", where=f"{_WHERE} --rename", fix=r"--rename '^model\.=backbone.'"
            )
        renames[pattern] = to
    return renames or None
