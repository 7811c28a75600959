"""A recorded step: its spans, its picture, its trace, and where each of them ends up."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_cpu_offload import OffloadMonitor
from lightning_cpu_offload.callbacks import Span, draw_step, draw_timeline, write_trace
from lightning_cpu_offload.callbacks.recording import busy, spans
from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.transfer import AcceleratorEngine, InlineEngine, Mark
from tests.models import quiet_trainer
from tests.net import Net, adamw, assert_equal, batches, fit, offload, sgd, weights
from tests.test_monitor import Records

LANES = ["compute", "d2h", "host", "h2d"]
NUM_CHUNKS = 2  # one of BF16 matrices, one of FP32 vectors


class Overlapping(InlineEngine):
    """Lets the training thread go on while the host works, as an accelerator does; copies still happen at once."""

    overlaps = True


def recorded_steps(path: Path, every: int = 1, make: Any = adamw, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Trains three steps and returns the spans of the trace that is written, by step."""
    monitor = OffloadMonitor(1, every, trace_path=path, summary=False)
    trainer = quiet_trainer(strategy=offload(**options), callbacks=[monitor], max_epochs=1, limit_val_batches=0)
    trainer.loggers = [Records()]
    trainer.fit(Net(make), batches(3))
    return read_trace(path)


def read_trace(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by step, their threads by name, as a viewer reads them."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            steps[names[event["pid"]]].append({**event, "lane": lanes[event["pid"], event["tid"]]})
    return steps


def mark(lane: Any, what: object, moment: float) -> Mark:
    return lane, what, lambda: moment


class TestSpans:
    def test_are_from_begin_to_end_on_each_lane(self) -> None:
        marks = [mark("d2h", 0, 5.0), mark("host", 0, 5.5), mark("d2h", None, 6.0), mark("host", None, 7.0)]
        assert spans(marks) == [Span("d2h", 0, 0.0, 1.0), Span("host", 0, 0.5, 2.0)]

    def test_what_began_before_or_did_not_end_has_none(self) -> None:
        marks = [mark("host", None, 1.0), mark("host", 1, 2.0), mark("host", None, 3.0), mark("host", 2, 4.0)]
        assert spans(marks) == [Span("host", 1, 0.0, 1.0)]

    def test_of_one_after_the_other_leave_the_gap_out(self) -> None:
        marks = [mark("host", what, moment) for moment, what in enumerate(["add", None, "add", None])]
        assert busy(spans(marks), "host") == 2.0

    def test_busy_is_by_lane_and_by_work(self) -> None:
        recorded = [Span("compute", "forward", 0, 1), Span("compute", "backward", 1, 4), Span("host", 0, 0, 9)]
        assert busy(recorded, "compute") == 4
        assert busy(recorded, "compute", "backward") == 3
        assert busy(recorded, "h2d") == 0


class TestRecording:
    def test_has_each_chunk_once_on_each_lane_in_the_order_of_its_way(self, tmp_path: Path) -> None:
        steps = recorded_steps(tmp_path / "trace.json")
        assert list(steps) == ["step 1", "step 2", "step 3"]
        for events in steps.values():
            assert {e["name"] for e in events if e["lane"] == "compute"} == {"forward", "backward"}
            for chunk in range(NUM_CHUNKS):
                way = [e for lane in LANES[1:] for e in events if (e["lane"], e["name"]) == (lane, f"chunk {chunk}")]
                assert [event["lane"] for event in way] == LANES[1:]
                for before, after in pairwise(way):
                    assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # rounding of microseconds

    def test_a_lane_does_one_thing_at_a_time(self, tmp_path: Path) -> None:
        for events in recorded_steps(tmp_path / "trace.json").values():
            for lane in LANES:
                own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["lane"] == lane)
                assert own
                assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(own))

    @pytest.mark.parametrize("update", ["exact", "delayed"])
    def test_of_a_step_that_is_under_way_when_the_next_batch_begins(
        self, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attach, "make_engine", Overlapping)
        options = {"exact_steps": 0} if update == "delayed" else {}
        steps = recorded_steps(tmp_path / "trace.json", update=update, **options)
        assert steps
        for events in steps.values():
            assert {event["lane"] for event in events} == set(LANES)

    @pytest.mark.parametrize("update", ["exact", "delayed"])
    def test_each_step_is_logged_under_its_own_number_once_it_has_landed(
        self, update: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attach, "make_engine", Overlapping)
        logger = Records()
        options = {"exact_steps": 0} if update == "delayed" else {}
        trainer = quiet_trainer(
            strategy=offload(update=update, **options),
            callbacks=[OffloadMonitor(1, None, summary=False)],
            max_epochs=1,
            limit_val_batches=0,
        )
        trainer.loggers = [logger]
        net = Net(adamw)
        trainer.fit(net, batches(3))
        assert list(logger.records) == [1, 2, 3]
        moved = sum(p.numel() * (2 if p.ndim >= 2 else 4) for p in net.parameters() if p.requires_grad)
        for record in logger.records.values():
            assert record["offload/d2h_bytes"] == record["offload/h2d_bytes"] == moved

    def test_of_gradients_that_leave_during_backward(self, tmp_path: Path) -> None:
        for events in recorded_steps(tmp_path / "trace.json", gradients="host").values():
            assert {e["name"] for e in events if e["lane"] == "d2h"} == {"gradients"}
            assert {e["name"] for e in events if e["lane"] == "host"} == {"add", "chunk 0", "chunk 1"}

    def test_of_an_optimizer_with_a_step_of_its_own(self, tmp_path: Path) -> None:
        for events in recorded_steps(tmp_path / "trace.json", make=sgd).values():
            assert {e["lane"] for e in events} == set(LANES)

    def test_is_made_of_the_steps_asked_for_only(self, tmp_path: Path) -> None:
        assert list(recorded_steps(tmp_path / "trace.json", every=2)) == ["step 2"]

    def test_rates_are_logged_with_it(self) -> None:
        logger = Records()
        fit(Net(adamw), callbacks=[OffloadMonitor(1, 2, summary=False)], logger=logger)
        names = {"forward_ms", "backward_ms", "d2h_ms", "h2d_ms", "d2h_gb_per_s", "h2d_gb_per_s"}
        for step, record in logger.records.items():
            logged = names & {name.removeprefix("offload/") for name in record}
            assert logged == (names if step == 2 else set())
            for lane in ("d2h", "h2d") if step == 2 else ():
                seconds = record[f"offload/{lane}_ms"] / 1e3
                assert record[f"offload/{lane}_bytes"] / seconds / 1e9 == pytest.approx(
                    record[f"offload/{lane}_gb_per_s"]
                )

    def test_nothing_is_marked_between_recordings(self) -> None:
        seen: list[Any] = []

        def look(trainer: pl.Trainer, *_: Any) -> None:
            seen.append(trainer.strategy.offload.pipeline.engine.marks)

        fit(Net(adamw), callbacks=[OffloadMonitor(1, 2)], logger=Records(), on_train_batch_start=look)
        assert [marks is not None for marks in seen] == [False, True, False]

    @pytest.mark.parametrize("update", ["exact", "delayed"])
    def test_changes_no_number(self, update: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attach, "make_engine", Overlapping)
        recorded, plain = Net(adamw), Net(adamw)
        for net, callbacks in ((recorded, [OffloadMonitor(1, 1, summary=False)]), (plain, [])):
            trainer = quiet_trainer(
                strategy=offload(update=update, exact_steps=0), callbacks=callbacks, max_epochs=1, limit_val_batches=0
            )
            trainer.loggers = [Records()]
            trainer.fit(net, batches(5))
        assert_equal(weights(recorded), weights(plain))


class FakeEvent:
    """An event of a device clock, which counts milliseconds from some moment of its own."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.milliseconds - self.milliseconds


def test_device_times_are_put_on_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clocked(AcceleratorEngine):
        def __init__(self) -> None:
            self.device_clock = 7000.0

        def _timed_event(self, lane: Any) -> Any:
            self.device_clock += 250
            return FakeEvent(self.device_clock)

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr("lightning_cpu_offload.offload.transfer.time", SimpleNamespace(perf_counter=lambda: 100.0))
    engine = Clocked()
    marks = engine.record_marks()
    for what in ("forward", None):
        engine.mark("compute", what)
        engine.mark("host", what)
    assert [(lane, what, moment()) for lane, what, moment in marks] == [
        ("compute", "forward", 100.25),
        ("host", "forward", 100.0),
        ("compute", None, 100.5),
        ("host", None, 100.0),
    ]


class TestPicture:
    SPANS = (Span("compute", "forward", 0.0, 1.0), Span("d2h", 0, 1.0, 1.5), Span("host", 0, 1.5, 3.0))

    def test_has_a_bar_for_each_span_in_milliseconds(self) -> None:
        axes = Figure().subplots()
        draw_timeline(axes, self.SPANS, "a step")
        boxes = [path.get_extents() for collection in axes.collections for path in collection.get_paths()]
        assert sorted((box.x0, box.x1) for box in boxes) == [(0, 1000), (1000, 1500), (1500, 3000)]
        rows = {round(box.y0 + 0.4) for box in boxes}
        titles = [label.get_text().partition("\n")[0] for label in axes.get_yticklabels()]
        assert [titles[row] for row in sorted(rows, reverse=True)] == ["compute", "d2h", "host"]

    def test_has_the_step_alone_below_if_there_is_one(self) -> None:
        figure = Figure()
        draw_step(figure, self.SPANS, "a step")
        whole, step = figure.axes
        assert whole.get_xlim()[0] < 0 < 3000 < whole.get_xlim()[1]
        assert step.get_xlim() == pytest.approx((1000 - 60, 3000 + 60))  # chunks move from second 1 to second 3
        figure = Figure()
        draw_step(figure, self.SPANS[:1], "a forward")
        assert len(figure.axes) == 1

    def test_draws_an_estimate_too(self) -> None:
        from lightning_cpu_offload.estimate.timeline import LANES as ESTIMATED
        from lightning_cpu_offload.estimate.timeline import Task

        axes = Figure().subplots()
        draw_timeline(axes, [Task(lane, "step", 0.0, 1.0) for lane in ESTIMATED])
        assert len(axes.collections) == len(ESTIMATED)

    def test_trace_makes_its_folder_and_keeps_every_span(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "trace.json"
        write_trace(path, {"a": self.SPANS, "b": self.SPANS[:1]})
        steps = read_trace(path)
        assert [(e["lane"], e["name"], e["ts"], e["dur"]) for e in steps["a"]] == [
            ("compute", "forward", 0.0, 1e6),
            ("d2h", "chunk 0", 1e6, 5e5),
            ("host", "chunk 0", 1.5e6, 1.5e6),
        ]
        assert len(steps["b"]) == 1


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    """What a run wrote."""
    torch.set_num_threads(1)
    logger = TensorBoardLogger(tmp_path_factory.mktemp("log"))
    fit(Net(adamw), callbacks=[OffloadMonitor(1, 2, summary=False)], logger=logger, log_every_n_steps=1)
    logger.finalize("success")
    return EventAccumulator(logger.log_dir).Reload()


class TestTensorBoard:
    def test_shows_the_timeline_at_its_step(self, log: EventAccumulator) -> None:
        (image,) = log.Images("offload/timeline")
        assert image.step == 1  # where Lightning logs the second step
        assert (image.width, image.height) == (800, 500)

    def test_page_has_every_scalar_and_names_nothing_else(self, log: EventAccumulator) -> None:
        content = log.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
        layout = layout_pb2.Layout.FromString(content)
        assert [category.title for category in layout.category] == ["cpu_offload"]
        tags = [tag for chart in layout.category[0].chart for tag in chart.multiline.tag]
        scalars = set(log.Tags()["scalars"])
        shown = {scalar for scalar in scalars for tag in tags if re.match(tag, scalar)}
        hidden = {"offload/d2h_bytes", "offload/h2d_bytes", "offload/host_bytes", "epoch"}  # constant, or a sum
        assert scalars - shown == hidden
        unused = {tag for tag in tags if not any(re.match(tag, scalar) for scalar in scalars)}
        assert unused == {"offload/device_peak_bytes$", ".*loss.*"}  # of accelerators; this module logs no loss

    def test_without_matplotlib_only_the_picture_is_missing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        logger = TensorBoardLogger(tmp_path)
        fit(Net(adamw), callbacks=[OffloadMonitor(1, 1, summary=False)], logger=logger, log_every_n_steps=1)
        logger.finalize("success")
        tags = EventAccumulator(logger.log_dir).Reload().Tags()
        assert tags["images"] == []
        assert "offload/d2h_gb_per_s" in tags["scalars"]


class TestArguments:
    @pytest.mark.parametrize("every", [0, -3])
    def test_timelines_come_after_a_positive_number_of_steps(self, every: int) -> None:
        with pytest.raises(ValueError, match=rf"timeline_every_n_steps={every}: a positive number of steps, or None"):
            OffloadMonitor(timeline_every_n_steps=every)

    def test_a_trace_needs_recorded_steps(self) -> None:
        with pytest.raises(ValueError, match=r"trace_path='x\.json': needs recorded steps"):
            OffloadMonitor(timeline_every_n_steps=None, trace_path="x.json")

    def test_a_trace_holds_the_last_steps_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_cpu_offload.callbacks.monitor.MOST_TRACED", 2)
        assert list(recorded_steps(tmp_path / "trace.json")) == ["step 2", "step 3"]


def test_image_is_not_blank() -> None:
    from lightning_cpu_offload.callbacks.timeline import timeline_image

    pixels = np.asarray(timeline_image(TestPicture.SPANS, "a step"))
    assert pixels.shape == (500, 800, 4)
    assert len(np.unique(pixels.reshape(-1, 4), axis=0)) > 10
