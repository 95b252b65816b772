"""Reports of real runs: their contents, and their looks in a browser."""

from __future__ import annotations

import html.parser
import json
import math
import shutil
import subprocess

import pytest
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import ArgumentError
from fnaccel.seeing.line_chart import Line, line_chart, number
from fnaccel.seeing.runs import read_run
from fnaccel.track import JsonlTracker
from tests.tiny_models import batch_of, loss_fn, program

VOID = {"meta", "br", "img"}


class Page(html.parser.HTMLParser):
    """The elements and texts of a page. Tags that do not match raise."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.references = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _train(steps, **options):
    train_step = program(fa.clip_norm(loss_fn, 1.0))
    loader = DataLoader(TensorDataset(*batch_of(40)), batch_size=4)
    for _ in fa.scan(train_step, train_step.init(), fa.shard(loader), steps=steps, **options):
        pass
    train_step.close()


def _log(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_run_ends_with_its_report(tmp_path):
    path = tmp_path / "report.html"
    track = fa.Tracking(report=path, config={"lr": 0.1, "name": "<b>bold</b>"})
    _train(8, track=track, watch=fa.Watch(throughput=True, memory=True))
    page = Page(path.read_text())
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Rows a second",
        "Peak memory, MiB",
        "Plan",
        "Environment",
    ):
        assert title in page.texts
    assert "<b>bold</b>" in page.texts  # and no element
    assert (
        path.read_text().count('class="charts"') == 1
    )  # with a grid for each topic each could end in half a row
    assert page.texts.index("Training") < page.texts.index("Loss") < page.texts.index("Speed")
    assert page.references == []
    assert "script" not in page.tags
    assert "8 steps in" in "".join(page.texts)
    assert fa.__version__ in page.texts


def test_runs_side_by_side_show_what_differs(tmp_path, capsys):
    for name, lr in (("first", 0.1), ("second", 0.2)):
        tracker = JsonlTracker(tmp_path / f"{name}.jsonl")
        _train(4, track=fa.Tracking(tracker, config={"lr": lr, "rows": 4}))
    assert main(["report", str(tmp_path)]) == 0
    path = tmp_path / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    page = Page(text)
    assert page.texts.count("first") > 1
    assert '<tr class="differs"><th>lr</th><td>0.1</td><td>0.2</td>' in text
    assert "<tr><th>rows</th><td>4</td><td>4</td>" in text
    assert "var(--line-1)" in text
    assert main(["report", str(tmp_path / "first.jsonl"), "-o", str(tmp_path / "one.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "one.html")}


def test_a_run_that_went_back_keeps_its_newer_steps(tmp_path):
    records = [{"time": 0, "config": {"a": 1}}]
    records += [{"step": step, "time": step, "loss": 1.0} for step in (1, 2, 3, 4)]
    records += [{"time": 90, "config": {"a": 2}}]
    records += [{"step": step, "time": 100 + step, "loss": 2.0} for step in (3, 4, 5)]
    run = read_run(_log(tmp_path / "run.jsonl", records))
    assert run.columns["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    assert run.restarts == (3,)
    assert run.config == {"a": 2}
    assert run.seconds == 5.0  # 3 before, 2 after, and no pause
    assert run.columns["steps_per_second"] == [(2, 1.0), (4, 1.0), (5, 1.0)]


def test_a_preempted_run_goes_on_in_its_report(tmp_path):
    path = tmp_path / "report.html"
    for steps in (3, 6):
        train_step = program()
        state = fa.resume_or_init(tmp_path / "run", train_step)
        loader = fa.shard(DataLoader(TensorDataset(*batch_of(40)), batch_size=4))
        for _ in fa.scan(
            train_step, state, loader, steps=steps, save=tmp_path / "run", track=fa.Tracking(report=path)
        ):
            pass
        train_step.close()
    run = read_run(tmp_path / "report.jsonl")
    assert [step for step, _ in run.columns["loss"]] == [1, 2, 3, 4, 5, 6]
    assert run.restarts == (4,)
    assert "started again at step 4" in path.read_text()


def test_values_that_are_not_finite_are_marked(tmp_path):
    records = [
        {"step": step, "time": step, "loss": "NaN" if step == 3 else 1.0 / step} for step in range(1, 6)
    ]
    path = _log(tmp_path / "run.jsonl", records)
    text = fa.seeing.write_report(path, tmp_path / "page.html").read_text()
    Page(text)
    assert "step 3: nan" in text
    assert text.count('class="broken"') == 1
    never = _log(tmp_path / "never.jsonl", [{"step": 1, "time": 1, "loss": "NaN"}])
    assert "no value is finite" in fa.seeing.write_report(never, tmp_path / "page.html").read_text()


def test_long_runs_make_small_pages(tmp_path):
    records = [{"step": s, "time": s, "loss": math.sin(s), "lr": 1 / s} for s in range(1, 20001)]
    path = fa.seeing.write_report(_log(tmp_path / "run.jsonl", records), tmp_path / "page.html")
    assert path.stat().st_size < 200_000
    assert "20,000 steps" in path.read_text()


def test_a_chart_keeps_its_extremes_and_its_scale():
    points = [(float(step), 500.0 if step == 777 else 1.0 + step % 3) for step in range(1, 2000)]
    drawn = line_chart("loss", [Line("run", 0, points)])
    highest = min(float(pair.split(",")[1]) for pair in drawn.split('points="')[1].split('"')[0].split())
    assert highest == 12.0  # the top of the chart
    assert ">100<" in drawn  # powers of ten
    flat = line_chart("lr", [Line("run", 0, [(1.0, 0.0), (2.0, 0.0)])])
    assert "nan" not in flat


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (-0.00025, "-2.5e-4"), (0.125, "0.125"), (2e9, "2G"), (99999.0, "100k")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_missing_and_empty_logs_raise(tmp_path):
    with pytest.raises(ArgumentError, match="there is no log"):
        fa.seeing.write_report(tmp_path, tmp_path / "page.html")
    _log(tmp_path / "run.jsonl", [{"time": 0, "config": {}}])
    with pytest.raises(ArgumentError, match="holds no step"):
        fa.seeing.write_report(tmp_path / "run.jsonl", tmp_path / "page.html")
    assert main(["report", str(tmp_path / "nothing.jsonl")]) == 2
    assert not (tmp_path / "page.html").exists()


MEASURE = """
<!doctype html><body><script>
// rows of charts that do not reach to the right edge
const half = boxes => {
  const edge = Math.max(...boxes.map(box => box.right)), tops = new Map();
  for (const box of boxes) tops.set(Math.round(box.top), Math.max(tops.get(Math.round(box.top)) ?? 0, box.right));
  return [...tops.values()].filter(right => right < edge - 5).length;
};
const frame = document.createElement('iframe');
frame.style.cssText = 'width:WIDTHpx;height:900px;border:0';
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const boxes = [...page.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect());
  const tick = page.querySelector('.tick'), scale = boxes[0].width / 640;
  document.title = JSON.stringify({
    wide: root.scrollWidth - root.clientWidth,
    charts: boxes.length,
    columns: new Set(boxes.map(box => Math.round(box.left))).size,
    halves: half([...page.querySelectorAll('figure')].map(figure => figure.getBoundingClientRect())),
    text: parseFloat(getComputedStyle(tick).fontSize) * scale,
    drawn: page.querySelector('polyline').getTotalLength() > 50,
    loaded: performance.getEntriesByType('resource').length,
  });
};
frame.srcdoc = PAGE;
document.body.append(frame);
</script>
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (1200, 2)])
def test_a_browser_shows_it_on_a_phone_and_on_a_desk(tmp_path, width, columns):
    track, watch = fa.Tracking(report=tmp_path / "report.html"), fa.Watch(throughput=True, memory=True)
    _train(80, track=track, watch=watch)
    text = json.dumps((tmp_path / "report.html").read_text()).replace("</", "<\\/")
    outer = tmp_path / "outer.html"
    outer.write_text(MEASURE.replace("WIDTH", str(width)).replace("PAGE", text))
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(html.unescape(done.stdout.split("<title>")[1].split("</title>")[0]))
    assert found["wide"] <= 0
    assert found["charts"] >= 8
    assert found["columns"] == columns
    assert found["halves"] <= 1, "only the last row may have an empty cell"
    assert found["text"] >= 10
    assert found["drawn"]
    assert found["loaded"] == 0


def _losses(path, losses, config=None):
    tracker = JsonlTracker(path)
    tracker.start(config or {})
    for step, loss in enumerate(losses, 1):
        tracker.log(step, {"loss": loss})
    tracker.finish()
    return path


def test_a_page_never_replaces_a_losses(tmp_path):
    log = _losses(tmp_path / "a.jsonl", [1.0])
    before = log.read_bytes()
    for path in (log, tmp_path):
        with pytest.raises(ArgumentError, match="where: fnaccel report"):
            fa.seeing.write_report(log, path)
        with pytest.raises(ArgumentError, match=r"where: fa.Tracking\(report=\)"):
            _train(1, track=fa.Tracking(report=path))
    assert log.read_bytes() == before


def test_a_first_loss_that_is_nan_is_not_the_best_one(tmp_path):
    page = fa.seeing.write_report(_losses(tmp_path / "a.jsonl", [math.nan, 2.0, 1.5]), tmp_path / "a.html")
    assert "best loss, step 3" in page.read_text()
    page = fa.seeing.write_report(_losses(tmp_path / "b.jsonl", [math.nan]), tmp_path / "b.html")
    assert "best loss" not in page.read_text()


def test_a_run_that_stays_nan_makes_no_large_page(tmp_path):
    log = _losses(tmp_path / "a.jsonl", [1.0, *[math.nan] * 5_000])
    assert len(fa.seeing.write_report(log, tmp_path / "a.html").read_text()) < 50_000


def test_of_a_folder_files_that_are_no_logs_are_left_out(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "step"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ArgumentError, match="there is no log in"):
        fa.seeing.write_report(tmp_path, tmp_path / "a.html")
    with pytest.raises(ArgumentError, match="a line without a step and a time"):
        fa.seeing.write_report(tmp_path / "data.jsonl", tmp_path / "a.html")
    _losses(tmp_path / "log.jsonl", [1.0])
    assert "1 steps" in fa.seeing.write_report(tmp_path, tmp_path / "a.html").read_text()
    with pytest.raises(ArgumentError, match="there is no log in"):
        fa.seeing.write_report([], tmp_path / "a.html")


def test_numbers_at_the_ends_of_the_range_are_drawn(tmp_path):
    log = tmp_path / "a.jsonl"
    lines = [
        f'{{"step": {i}, "time": {i}, "loss": {v}}}\n'
        for i, v in enumerate(("1e308", "-1e308", 10**400, "5e-324"))
    ]
    log.write_text("".join(lines))
    assert "<svg" in fa.seeing.write_report(log, tmp_path / "a.html").read_text()


def test_short_numbers_round_into_the_next_unit():
    values = (999_999, 9_999.99, 9_999, 999_999_999, 12_345, math.inf, math.nan)
    assert [number(value) for value in values] == ["1M", "10k", "9999", "1G", "12.3k", "inf", "nan"]


def test_evaluations_are_in_the_chart_of_their_metric(tmp_path):
    shards = fa.shard(DataLoader(TensorDataset(*batch_of(9, 1)), batch_size=3))
    held_out = [fa.Evaluation(loss_fn, shards, every=2), fa.Evaluation(loss_fn, shards, name="test", every=3)]
    log, path = JsonlTracker(tmp_path / "a.jsonl"), tmp_path / "a.html"
    _train(6, evaluate=held_out, track=fa.Tracking(log, report=path))
    text = path.read_text()
    chart = next(part for part in text.split("<figure>") if "<h3>Loss</h3>" in part)
    assert all(f">{name}</li>" in chart for name in ("loss", "eval/loss", "test/loss"))
    assert chart.count("var(--line-2)") > 1  # the legend, and a line
    assert "<h3>eval/loss</h3>" not in text
    other = JsonlTracker(tmp_path / "b.jsonl")
    _train(6, evaluate=held_out, track=fa.Tracking(other))
    both = fa.seeing.write_report(tmp_path, tmp_path / "both.html").read_text()
    assert "<h3>eval/loss</h3>" in both  # a colour is a run there
