"""What a tracker has written, read from its files: `READERS[name](folder)` for the folder of `real_run.start`.

Each reader returns a `Written`. Values are those of the files, without the classes of fnaccel.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sqlite3
import struct
import warnings
import zipfile
from pathlib import Path

import attrs


@attrs.define
class Written:
    """The contents of one run.

    Attributes:
        metrics: name -> {step: value}.
        texts: name -> {step: text}.
        config: name -> text of the value, nested names joined by `/`.
        image: width and height of the image `digits`.
        figure: whether the figure `curve` is there, 100 pixels wide or as lines.
        table: the table `words` as text.
        artifact: the text of the file that was kept.
    """

    metrics: dict = attrs.field(factory=dict)
    texts: dict = attrs.field(factory=dict)
    config: dict = attrs.field(factory=dict)
    image: tuple | None = None
    figure: bool = False
    table: str | None = None
    artifact: str | None = None

    def add(self, name, step, value):
        is_text = name in ("note", "plan", "environment")
        values, value = (self.texts, value) if is_text else (self.metrics, float(value))
        values.setdefault(name, {})[int(step)] = value


def flat(value, name=""):
    if isinstance(value, dict):
        return {
            key: text for part, each in value.items() for key, text in flat(each, f"{name}/{part}").items()
        }
    return {name.strip("/"): str(value)}


def size(source):
    from PIL import Image

    with Image.open(source) as image:
        return image.size


def only(paths):
    [path] = paths
    return path


def read_jsonl(folder):
    written = Written()
    first, *rest = map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines())
    written.config = flat(first["config"])
    for record in rest:
        written.config |= flat(record.pop("config", {}))
        for name in record.keys() - {"step", "time", "more"}:
            written.add(name, record["step"], record[name])
    return written


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "logs")).Reload()
    written = Written()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            written.add(name, event.step, event.value)
    texts = {
        name.removesuffix("/text_summary"): events.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
    }
    fields = {
        name.removeprefix("config/"): text.strip("`\n")
        for name, text in texts.items()
        if name.startswith("config/")
    }
    written.config = flat(
        {name: json.loads(text) if text[:1] in "{n" else text for name, text in fields.items()}
    )
    [note] = events.Tensors("note/text_summary")
    assert note.wall_time == events.Scalars("eval/width")[0].wall_time == 1.5
    written.add("note", note.step, texts["note"])
    written.image = size(io.BytesIO(events.Images("digits")[0].encoded_image_string))
    written.figure = size(io.BytesIO(events.Images("curve")[0].encoded_image_string))[0] == 100
    written.table = texts["words"]
    return written


def wandb_records(data):
    """The records of a .wandb file: a LevelDB log (blocks of 32 KiB) behind a header of 7 bytes.

    Recent wandb reads it in Go only; the format is github.com/google/leveldb/blob/main/doc/log_format.md.
    """
    assert data.startswith(b":W&B")
    at, parts = 7, []
    while at < len(data):
        if 32_768 - at % 32_768 < 7:  # the rest of a block is padding
            at += 32_768 - at % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def wandb_named(items):
    """Values by name; wandb fills either of two fields with it."""
    return {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    written = Written()
    run = only(folder.glob("logs/wandb/offline-run-*"))
    for data in wandb_records(only(run.glob("run-*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            written.config |= flat(wandb_named(record.run.config.update))
        if record.WhichOneof("record_type") == "config":
            written.config |= flat(wandb_named(record.config.update))
        if record.WhichOneof("record_type") == "artifact":
            entry = record.artifact.manifest.contents[0]
            if entry.path == "notes.txt":
                written.artifact = Path(entry.local_path).read_text()
        for name, value in wandb_named(record.history.item).items():
            is_media = isinstance(value, dict) or name.split("/")[0] in ("digits", "curve", "words")
            if name[0] != "_" and not is_media:
                written.add(name, wandb_named(record.history.item)["_step"], value)
    media = run / "files" / "media"
    written.image = size(only(media.glob("images/digits_*.png")))
    written.figure = size(only(media.glob("images/curve_*.png")))[0] == 100
    written.table = only(media.glob("table/words_*.json")).read_text()
    return written


def read_mlflow(folder):
    written = Written()
    with contextlib.closing(sqlite3.connect(folder / "logs" / "mlflow.db")) as database:
        for name, step, value in database.execute("select key, step, value from metrics"):
            written.add(name, step, value)
        written.config = dict(database.execute("select key, value from params").fetchall())
        [(experiment,)] = database.execute("select name from experiments where name != 'Default'")
        assert experiment == "fnaccel"
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
    files = only((folder / "logs" / "mlartifacts").iterdir()) / "artifacts"
    written.add("note", 2, (files / "note" / "2.txt").read_text())
    written.image = size(only(files.glob("images/digits*.png")))
    written.figure = size(files / "curve" / "2.png")[0] == 100
    written.table = (files / "words" / "2.json").read_text()
    written.artifact = (files / "notes.txt").read_text()
    return written


def read_aim(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # aim 3.29 calls SQLAlchemy by old names
        return _read_aim(folder)


def _read_aim(folder):
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    written = Written()
    repository = aim.Repo(str(folder / "logs"))
    [run_hash] = repository.list_all_runs()
    RepoIndexManager.get_index_manager(repository).index(run_hash)  # `aim up` does it
    [run] = repository.iter_runs()
    written.config = flat(run["config"])
    for metric in run.metrics():
        if metric.name.startswith("__system__"):
            continue
        assert metric.context.to_dict() == ({"part": "first"} if metric.name == "eval/width" else {})
        for row in metric.dataframe().itertuples():
            written.add(metric.name, row.step, row.value)
    for group in repository.query_images("True").iter_runs():
        for sequence in group:
            shown = sequence.values.values_list()[0]
            picture = (shown[0] if isinstance(shown, list) else shown).to_pil_image()
            if sequence.name == "digits":
                written.image = picture.size
            else:
                written.figure = picture.size[0] == 100
    for group in repository.query_texts("True").iter_runs():
        for sequence in group:
            text = sequence.values.values_list()[0].data
            if sequence.name == "note":
                written.add("note", sequence.values.sparse_list()[0][0], text)
            elif sequence.name == "words":
                written.table = text
    written.artifact = (folder / "logs" / "aim_artifacts" / run_hash / "notes.txt").read_text()
    return written


def read_comet(folder):
    written = Written()
    with zipfile.ZipFile(only((folder / "logs").glob("*.zip"))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    for line in files["messages.json"].decode().splitlines():
        message = json.loads(line)
        payload = message["payload"]
        if message["type"] == "metric_msg":
            metric = payload["metric"]
            if metric["step"] is None or metric["metricName"].startswith(("sys.", "process ")):
                continue  # comet's own, of the machine
            assert metric["epoch"] == 1 or metric["metricName"] != "eval/width"
            written.add(metric["metricName"], metric["step"], metric["metricValue"])
        elif message["type"] == "parameter_msg":
            written.config[payload["param"]["paramName"]] = str(payload["param"]["paramValue"])
        elif message["type"] == "file_upload":
            data = files[Path(payload["file_path"]).name]
            name = payload["additional_params"].get("fileName") or payload["additional_params"].get("figName")
            if payload["upload_type"] == "text-sample":
                written.add(payload["metadata"]["name"], payload["additional_params"]["step"], data.decode())
            elif name == "digits":
                written.image = size(io.BytesIO(data))
            elif name == "curve":
                written.figure = data.startswith(b"<?xml") and b"<svg" in data
            elif name == "words_2.csv":
                written.table = data.decode()
            elif name == "notes.txt":
                written.artifact = data.decode()
    return written


def read_clearml(folder):
    written = Written()
    session = only(path for path in (folder / "logs" / "offline").iterdir() if path.is_dir())
    for line in (session / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            if event["type"] == "training_stats_scalar":
                title, series = event["metric"], event["variant"]
                name = title if title == series else f"{title}/{series}"
                written.add(name, event["iter"], event["value"])
            elif event["type"] == "plot" and event["metric"] == "words":
                written.table = event["plot_str"]
            elif event["type"] == "plot" and event["metric"] == "curve":
                [line] = json.loads(event["plot_str"])["data"]
                written.figure = line["y"] == [1.0, 2.0]  # ClearML keeps lines, not pixels
    console = [json.loads(line) for line in (session / "log.jsonl").read_text().splitlines()]
    for line in "\n".join(event["msg"] for events in console for event in events).splitlines():
        if line.startswith("step ") and ", note: " in line:
            written.add("note", line.split(",")[0].split()[1], line.split(": ", 1)[1])
    task = json.loads((session / "task.json").read_text())
    written.config = {
        name: each.get("value") or "None" for name, each in task["hyperparams"]["config"].items()
    }
    written.image = size(only(session.rglob("digits_*.jpeg")))
    written.artifact = only(session.rglob("artifacts/notes.txt/notes.txt")).read_text()
    assert only((folder / "logs" / "offline").glob("*.zip")).stat().st_size > 0
    return written


def read_dvclive(folder):
    import yaml

    written = Written()
    live = folder / "logs" / "dvclive"
    metrics = live / "plots" / "metrics"
    for file in metrics.rglob("*.tsv"):
        name = file.relative_to(metrics).with_suffix("").as_posix()
        for row in csv.DictReader(file.read_text().splitlines(), delimiter="\t"):
            assert ("timestamp" in row) == (name in ("note", "eval/width"))
            written.add(name, row["step"], row[file.stem])
    written.config = flat(yaml.safe_load((live / "params.yaml").read_text()))
    written.image = size(live / "plots" / "images" / "digits.png")
    written.figure = size(live / "plots" / "images" / "curve.png")[0] == 100
    written.table = (live / "tables" / "words" / "2.csv").read_text()
    return written


def read_swanlab(folder):
    import yaml
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    written = Written()
    run = only((folder / "logs").glob("run-*"))
    reader = DataStoreReader()
    reader.open(only(run.glob("*.swanlab")))
    records = list(reader)
    reader.close()
    for data in records:
        record = record_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "scalar" and not record.scalar.key.startswith("__swanlab__"):  # it watches the machine
            written.add(record.scalar.key, record.scalar.step, record.scalar.value.number)
        elif kind == "media":
            [item] = record.media.value.items
            [path] = run.glob(f"media/*/{item.filename}")
            if record.media.key == "digits":
                written.image = size(path)
            elif record.media.key == "note":
                written.add("note", record.media.step, path.read_text())
            elif record.media.key == "curve":
                written.figure = size(path)[0] == 100
            else:
                written.table = path.read_text()
    config = yaml.safe_load((run / "files" / "config.yaml").read_text())
    written.config = flat({name: each["value"] or None for name, each in config.items()})
    return written


def read_trackio(folder):
    written = Written()
    logs = folder / "logs"
    with contextlib.closing(sqlite3.connect(logs / "fnaccel.db")) as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
        [(config,)] = database.execute("select config from configs")
        [(manifest,)] = database.execute("select manifest from artifact_versions")
    for step, values in rows:
        for name, value in json.loads(values).items():
            if not isinstance(value, dict):
                written.add(name, step, value)
            elif value["_type"] == "trackio.markdown":
                written.add(name, step, value["_value"])
            elif name == "words":
                written.table = json.dumps(value)
            elif name == "digits":
                written.image = size(logs / "media" / value["file_path"])
            else:
                written.figure = size(logs / "media" / value["file_path"])[0] == 100
    written.config = flat({name: each for name, each in json.loads(config).items() if name[0] != "_"})
    [entry] = json.loads(manifest)
    blob = only((logs / "artifacts").rglob(entry["digest"]))
    written.artifact = blob.read_text()
    return written


READERS = {
    name.removeprefix("read_"): value for name, value in list(globals().items()) if name[:5] == "read_"
}
