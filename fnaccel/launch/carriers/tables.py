"""Tables of two columns with tabs between them: the inputs and the metrics of a training job."""

from __future__ import annotations

from pathlib import Path

from fnaccel.errors import LaunchError


def read_table(path: Path, columns: tuple[str, str], field: str) -> list[tuple[str, str]]:
    """The rows of a table after its header.

    Args:
        path: a text file. Its first line is the header. Empty lines are left out.
        columns: the two names of the header.
        field: of the recipe, for an error.

    Raises:
        LaunchError: there is no such file, another header, or a row without two columns.

    Example:
        >>> Path("inputs.tsv").write_text("channel_name\\tdata_location\\ntrain\\ts3://bucket/train\\n")
        >>> read_table(Path("inputs.tsv"), ("channel_name", "data_location"), "launch.sagemaker.inputs_file")
        [('train', 's3://bucket/train')]
    """
    if not path.is_file():
        raise LaunchError(f"there is no file {path}", where=field, fix="check the path")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [tuple(cell.strip() for cell in line.split("\t")) for line in lines]
    fix = f"the first line is {columns[0]}<tab>{columns[1]}"
    if not rows or rows[0] != columns:
        raise LaunchError(f"{path} has no header with its two columns", where=field, fix=fix)
    pairs: list[tuple[str, str]] = []
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2 or not all(row):
            raise LaunchError(f"line {number} of {path} has no two columns", where=field, fix=fix)
        pairs.append((row[0], row[1]))
    return pairs
