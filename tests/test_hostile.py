"""Bad files, full disks and hostile input: an error that names what is wrong, and nothing half-done."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import random
import re
import signal
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_cpu_offload import atomic
from lightning_cpu_offload.archive import BadCheckpointError
from lightning_cpu_offload.checkpoint import StreamingCheckpointIO
from tests.models import quiet_trainer
from tests.net import Net, adamw, assert_equal, batches, fit, offload, sgd, weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of one epoch of `Net` with AdamW."""
    path = tmp_path / "x.ckpt"
    fit(Net(adamw)).save_checkpoint(path)
    return path


class Touches:
    """Unpickling this makes a file: what a hostile checkpoint could do, made harmless."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


class TestFiles:
    def refuse(self, path: Path, match: str) -> None:
        """Fit refuses to resume from the file, names it, and leaves the module as it was."""
        net = Net(adamw)
        before = weights(net)
        with pytest.raises(BadCheckpointError, match=match) as error:
            resume(net, path)
        assert str(path) in str(error.value)
        assert_equal(weights(net), before)

    @pytest.mark.parametrize("part", [0.001, 0.3, 0.9, 0.999])
    def test_truncated(self, checkpoint: Path, part: float) -> None:
        data = checkpoint.read_bytes()
        checkpoint.write_bytes(data[: max(4, int(len(data) * part))])
        self.refuse(checkpoint, "truncated")

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "x.ckpt").touch()
        self.refuse(tmp_path / "x.ckpt", "empty")

    def test_every_flipped_bit_is_noticed_or_harmless(self, checkpoint: Path) -> None:
        good = checkpoint.read_bytes()
        expected = StreamingCheckpointIO().load_checkpoint(checkpoint)["state_dict"]
        generator = random.Random(0)
        noticed: list[str] = []
        for _ in range(300):
            place = generator.randrange(len(good))
            bad = bytearray(good)
            bad[place] ^= 1 << generator.randrange(8)
            checkpoint.write_bytes(bad)
            try:
                found = StreamingCheckpointIO().load_checkpoint(checkpoint)["state_dict"]
            except BadCheckpointError as error:
                noticed.append(str(error))
            else:  # padding between the parts of the archive, a date, ...
                assert_equal(dict(found), dict(expected))
        assert len(noticed) > 100
        assert all(str(checkpoint) in message for message in noticed)

    def test_a_flipped_bit_of_a_tensor_names_its_part(self, checkpoint: Path) -> None:
        with zipfile.ZipFile(checkpoint) as archive:
            info = next(info for info in archive.infolist() if "/data/" in info.filename and info.file_size >= 512)
        data = bytearray(checkpoint.read_bytes())
        data[data.index(info.filename.encode()) + 300] ^= 4  # behind the name, and the padding to 64
        checkpoint.write_bytes(data)
        self.refuse(checkpoint, re.escape(info.filename))
        StreamingCheckpointIO(verify=False).load_checkpoint(checkpoint)

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
            (bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b'{"a": {} }' + bytes(9), "safetensors"),
            (b"epoch,loss\n1,2\n", "not a file that torch.save wrote"),
            (pickle.dumps({"state_dict": {}}), "not a file that torch.save wrote"),
        ],
        ids=["hdf5", "safetensors", "text", "pickle"],
    )
    def test_foreign(self, tmp_path: Path, data: bytes, match: str) -> None:
        (tmp_path / "x.ckpt").write_bytes(data)
        self.refuse(tmp_path / "x.ckpt", match)

    def test_foreign_archive(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
            archive.writestr("readme.txt", "hello")
        self.refuse(tmp_path / "x.ckpt", "cannot be read")

    def test_a_folder(self, tmp_path: Path) -> None:
        self.refuse(tmp_path, "a folder")

    def test_weights_without_a_checkpoint(self, tmp_path: Path) -> None:
        torch.save(Net().state_dict(), tmp_path / "x.pt")
        self.refuse(tmp_path / "x.pt", "it holds 13 tensors and no 'pytorch-lightning_version'")

    def test_a_tensor(self, tmp_path: Path) -> None:
        torch.save(torch.ones(1), tmp_path / "x.pt")
        self.refuse(tmp_path / "x.pt", "holds a Tensor")

    def test_of_torch_before_archives_loads(self, checkpoint: Path) -> None:
        content = torch.load(checkpoint, weights_only=True)
        torch.save(content, checkpoint, _use_new_zipfile_serialization=False)
        net = Net(adamw)
        resume(net, checkpoint)
        assert_equal(weights(net), dict(content["state_dict"]))

    def test_of_an_older_lightning_loads(self, checkpoint: Path) -> None:
        content = torch.load(checkpoint, weights_only=True)
        content["pytorch-lightning_version"] = "1.9.0"
        torch.save(content, checkpoint)
        net = Net(adamw)
        resume(net, checkpoint)
        assert_equal(weights(net), dict(content["state_dict"]))


def resume(net: Net, path: Path, **options: Any) -> pl.Trainer:
    """Continues a run that is over already: it loads everything and trains nothing."""
    trainer = quiet_trainer(strategy=offload(), max_epochs=1)
    trainer.fit(net, batches(), ckpt_path=str(path), **options)
    return trainer


class Wider(Net):
    def __init__(self) -> None:
        super().__init__(adamw)
        self.outer = nn.Linear(16, 5)


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__(adamw)
        self.extra = nn.Linear(2, 2)


class Shallower(Net):
    def __init__(self) -> None:
        super().__init__(adamw)
        del self.frozen


class TestArchitectures:
    @pytest.mark.parametrize(
        ("build", "match"),
        [
            (Wider, r"'outer.weight' is of shape \(4, 16\) in it and of shape \(5, 16\) here"),
            (Deeper, r"lacks 'extra.weight' of shape \(2, 2\)"),
            (Shallower, r"holds 'frozen.weight' of shape \(16, 16\), which is not here"),
        ],
    )
    def test_that_differ_are_refused_before_anything_is_loaded(
        self, checkpoint: Path, build: Callable[[], Net], match: str
    ) -> None:
        net = build()
        before = weights(net)
        with pytest.raises(BadCheckpointError, match=match):
            resume(net, checkpoint)
        assert_equal(weights(net), before)

    def test_what_is_not_strict_may_lack_names(self, checkpoint: Path) -> None:
        net = Deeper()
        net.strict_loading = False
        extra = weights(net.extra)
        trainer = quiet_trainer(strategy=offload())
        trainer.validate(net, batches(), ckpt_path=str(checkpoint), verbose=False)
        assert_equal(weights(net.extra), extra)

    def test_loading_code_of_the_module_is_trusted(self, checkpoint: Path) -> None:
        class Renamed(Net):
            def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
                for name in [name for name in state_dict if name.startswith("inner.")]:
                    state_dict[name.replace("inner", "first")] = state_dict.pop(name)
                super()._load_from_state_dict(state_dict, prefix, *args)

            def __init__(self) -> None:
                super().__init__(adamw)
                self.first = self.inner
                del self.inner

            def forward(self, x: Tensor) -> Tensor:
                return self.outer(self.frozen(self.norm(torch.tanh(self.first(x))))) * self.gain

        net = Renamed()
        quiet_trainer(strategy=offload()).validate(net, batches(), ckpt_path=str(checkpoint), verbose=False)
        saved = torch.load(checkpoint, weights_only=True)["state_dict"]
        assert torch.equal(net.first.weight, saved["inner.weight"])

    @pytest.mark.parametrize(
        ("optimizer", "match"),
        [
            (sgd, "optimizer 0 .SGD.: group 0 lacks 'dampening'"),
            (lambda net: adamw(net.inner), "group 0 has 8 parameters in it and 2 here"),
            (lambda net: torch.optim.AdamW([{"params": [p]} for p in net.parameters()]), "1 parameter groups in it"),
            (lambda net: None, "optimizer 0 ._MockOptimizer.: 1 parameter groups in it and 0 here"),
        ],
        ids=["class", "parameters", "groups", "none"],
    )
    def test_optimizers_that_differ_are_refused(self, checkpoint: Path, optimizer: Any, match: str) -> None:
        made: list[torch.optim.Optimizer] = []

        def build(net: Any) -> Any:
            made.append(optimizer(net))
            return made[-1]

        with pytest.raises(BadCheckpointError, match=match):
            resume(Net(build), checkpoint)
        assert all(not one.state for one in made if one)

    def test_state_of_other_shapes_is_refused(self, checkpoint: Path) -> None:
        content = torch.load(checkpoint, weights_only=True)
        content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(3, 3)
        torch.save(content, checkpoint)
        with pytest.raises(BadCheckpointError, match=r"exp_avg of parameter 0 is of shape \(3, 3\)"):
            resume(Net(adamw), checkpoint)

    @pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta"])
    def test_optimizers_that_fit_are_not_refused(self, tmp_path: Path, name: str) -> None:
        def build(net: Any) -> torch.optim.Optimizer:
            return getattr(torch.optim, name)(net.parameters(), lr=0.01)

        fit(Net(build)).save_checkpoint(tmp_path / "x.ckpt")
        trainer = resume(Net(build), tmp_path / "x.ckpt")
        assert trainer.optimizers[0].state_dict()["state"].keys() or name == "SGD"


class TestCode:
    """`weights_only` is what stands between a file and the user's account."""

    def hostile(self, checkpoint: Path) -> Path:
        victim = checkpoint.parent / "victim"
        content = torch.load(checkpoint, weights_only=True)
        content["hyper_parameters"] = {"x": Touches(victim)}
        torch.save(content, checkpoint)
        return victim

    @pytest.mark.parametrize("variable", [None, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
    def test_is_not_run_by_default(
        self, checkpoint: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        victim = self.hostile(checkpoint)
        if variable:
            monkeypatch.setenv(variable, "1")
        net = Net(adamw)
        before = weights(net)
        with pytest.raises(BadCheckpointError, match=r"holds \S*open.*weights_only=False"):
            resume(net, checkpoint)
        assert not victim.exists()
        assert_equal(weights(net), before)

    def test_is_not_run_from_a_remote_file(self, checkpoint: Path) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        victim = self.hostile(checkpoint)
        MemoryFileSystem().pipe("/hostile.ckpt", checkpoint.read_bytes())
        with pytest.raises(BadCheckpointError, match=r"memory://hostile\.ckpt: holds"):
            StreamingCheckpointIO().load_checkpoint("memory://hostile.ckpt")
        assert not victim.exists()

    @pytest.mark.parametrize("how", ["call", "option"])
    def test_is_run_where_the_user_said_so(self, checkpoint: Path, how: str) -> None:
        victim = self.hostile(checkpoint)
        if how == "call":
            StreamingCheckpointIO().load_checkpoint(checkpoint, weights_only=False)
        else:
            StreamingCheckpointIO(weights_only=False).load_checkpoint(checkpoint)
        assert victim.exists()

    def test_a_name_is_only_a_name(self, tmp_path: Path) -> None:
        """Paths come from configs: nothing in them is expanded or run."""
        name = "$(touch pwned); `id` %s {0} ~ *.ckpt"
        StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / name)
        assert os.listdir(tmp_path) == [name]
        assert StreamingCheckpointIO().load_checkpoint(tmp_path / name) == {"value": 1}
        StreamingCheckpointIO().remove_checkpoint(str(tmp_path / "*"))
        assert os.listdir(tmp_path) == [name]

    def test_a_size_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        """A tensor that claims more than the file holds is an error, and takes no memory."""
        buffer = io.BytesIO()
        torch.save({"value": torch.zeros(7)}, buffer)
        with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(tmp_path / "x.ckpt", "w") as target:
            for info in source.infolist():
                data = source.read(info)
                if info.filename.endswith("data.pkl"):
                    assert data.count(b"K\x07") == 2  # the storage's size and the tensor's
                    data = data.replace(b"K\x07", b"J\x00\x00\x00\x70")
                target.writestr(info.filename, data)
        with pytest.raises(BadCheckpointError):
            StreamingCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Lets each file take `room` bytes, and then refuses as a full disk does."""
    original = atomic.os.fdopen

    def fdopen(*args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        return Full(file, room)

    monkeypatch.setattr(atomic.os, "fdopen", fdopen)


class Full:
    """A file on a disk with little room."""

    def __init__(self, file: Any, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()


class TestFullDisk:
    VALUE = {"value": torch.ones(100_000)}  # noqa: RUF012

    @pytest.mark.parametrize("room", [0, 1000, 200_000, 400_000])
    def test_is_named_and_leaves_the_old_file(self, tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.ckpt"
        StreamingCheckpointIO().save_checkpoint({"value": torch.zeros(3)}, path)
        fill_disk(monkeypatch, room)
        with pytest.raises(OSError, match=r"the disk is full: 400,000 bytes are needed, [\d,]+ are free.*x.ckpt") as e:
            StreamingCheckpointIO().save_checkpoint(self.VALUE, path)
        assert e.value.errno == errno.ENOSPC
        assert e.value.filename == str(path)
        assert os.listdir(tmp_path) == ["x.ckpt"]
        assert torch.equal(StreamingCheckpointIO().load_checkpoint(path)["value"], torch.zeros(3))

    def test_is_seen_before_anything_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = type("usage", (), {"total": 10**6, "free": 399_999})
        monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(OSError, match="400,000 bytes are needed, 399,999 are free"):
            StreamingCheckpointIO().save_checkpoint(self.VALUE, tmp_path / "x.ckpt")
        assert os.listdir(tmp_path) == []
        usage.free = 400_000
        StreamingCheckpointIO().save_checkpoint(self.VALUE, tmp_path / "x.ckpt")

    @pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs a limit of a process")
    def test_a_limit_of_the_system_is_met_for_real(self, tmp_path: Path) -> None:
        process = multiprocessing.get_context("fork").Process(target=save_with_limit, args=(tmp_path / "x.ckpt",))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert os.listdir(tmp_path) == []

    def test_lets_training_go_on_if_the_user_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        net = Net(adamw)
        folder = tmp_path / "checkpoints"
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1)  # keeps the newest one
        full = iter([False, True, True, False, False, False])
        written: list[list[str]] = []

        class Sometimes(StreamingCheckpointIO):
            def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                with pytest.MonkeyPatch.context() as patch:
                    if next(full):
                        fill_disk(patch, 1000)
                    super().save_checkpoint(*args, **kwargs)

        look = pl.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_: written.append(sorted(path.name for path in folder.iterdir()))
        )
        strategy = offload(checkpoint_io=Sometimes(on_disk_full="warn"))
        trainer = quiet_trainer(strategy=strategy, max_epochs=1)
        trainer.callbacks.extend([saving, look])
        with pytest.warns(UserWarning, match="no checkpoint was written, training goes on.*the disk is full"):
            trainer.fit(net, batches(5))
        assert trainer.global_step == 5
        one, four, five = ["step=1.ckpt"], ["step=4.ckpt"], ["step=5.ckpt"]
        assert written == [one, one, one, four, five]

    def test_other_errors_are_not_forgiven(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            StreamingCheckpointIO(on_disk_full="warn").save_checkpoint({}, tmp_path / "file" / "x.ckpt")

    def test_the_option_is_checked(self) -> None:
        with pytest.raises(ValueError, match="on_disk_full='ignore': one of 'raise', 'warn'"):
            StreamingCheckpointIO(on_disk_full="ignore")  # type: ignore[arg-type]


def save_with_limit(path: Path) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(OSError, match="the limit of a file's size is lower: 400,000 bytes are needed") as error:
        StreamingCheckpointIO().save_checkpoint(TestFullDisk.VALUE, path)
    assert error.value.errno == errno.EFBIG


class TestTemporaryFiles:
    def test_are_new_and_no_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        victim = tmp_path / "victim"
        victim.write_text("precious")
        monkeypatch.setattr(atomic.secrets, "token_hex", lambda _: "guessed")
        (tmp_path / f".x.ckpt.guessed{atomic.SUFFIX}").symlink_to(victim)
        with pytest.raises(FileExistsError):
            StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "x.ckpt")
        assert victim.read_text() == "precious"

    def test_follow_the_umask_and_are_nobody_elses_to_write(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "x.ckpt")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "x.ckpt").stat().st_mode) == 0o640

    def test_of_killed_saves_are_swept(self, tmp_path: Path) -> None:
        with atomic.replacing(tmp_path / "a.ckpt"):
            (name,) = os.listdir(tmp_path)
        (tmp_path / name).write_bytes(b"half a checkpoint")
        others = [f"x{atomic.SUFFIX}", ".x.tmp", ".hidden.ckpt", "tmp"]
        for other in others:
            (tmp_path / other).touch()
        (tmp_path / f".link{atomic.SUFFIX}").symlink_to(tmp_path / "tmp")
        (tmp_path / f".folder{atomic.SUFFIX}").mkdir()
        StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "b.ckpt")
        kept = {*others, f".link{atomic.SUFFIX}", f".folder{atomic.SUFFIX}", "a.ckpt", "b.ckpt"}
        assert set(os.listdir(tmp_path)) == kept

    def test_that_are_being_written_are_left_alone(self, tmp_path: Path) -> None:
        with atomic.replacing(tmp_path / "a.ckpt") as file:
            file.write(b"a")
            with atomic.replacing(tmp_path / "b.ckpt") as other:
                other.write(b"b")
        assert (tmp_path / "a.ckpt").read_bytes() == b"a"
        assert (tmp_path / "b.ckpt").read_bytes() == b"b"

    def test_swept_before_they_are_locked_are_made_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        original = atomic._lock

        def swept_first(descriptor: int) -> bool:
            monkeypatch.setattr(atomic, "_lock", original)
            atomic.sweep(tmp_path)
            return original(descriptor)

        monkeypatch.setattr(atomic, "_lock", swept_first)
        StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "x.ckpt")
        assert StreamingCheckpointIO().load_checkpoint(tmp_path / "x.ckpt") == {"value": 1}

    def test_a_folder_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "x.ckpt").mkdir()
        with pytest.raises(IsADirectoryError, match="a folder is there"):
            StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "x.ckpt")

    def test_a_link_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "old").write_bytes(b"old")
        (tmp_path / "x.ckpt").symlink_to(tmp_path / "old")
        StreamingCheckpointIO().save_checkpoint({"value": 1}, tmp_path / "x.ckpt")
        assert (tmp_path / "old").read_bytes() == b"old"
        assert not (tmp_path / "x.ckpt").is_symlink()

    def test_interrupted_writing_leaves_the_interrupt(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The unfinished archive raises an error of its own; what counts is why it is unfinished."""

        def interrupt(*_: Any) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(Full, "write", interrupt)
        fill_disk(monkeypatch, 0)
        with pytest.raises(KeyboardInterrupt):
            StreamingCheckpointIO().save_checkpoint(TestFullDisk.VALUE, tmp_path / "x.ckpt")
        assert os.listdir(tmp_path) == []


def test_progress_is_shown_for_large_files_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    value = {"value": torch.ones(1000)}
    StreamingCheckpointIO().save_checkpoint(value, tmp_path / "small.ckpt")
    StreamingCheckpointIO().load_checkpoint(tmp_path / "small.ckpt")
    assert capfd.readouterr().err == ""
    StreamingCheckpointIO(progress_bytes=4000).save_checkpoint(value, tmp_path / "large.ckpt")
    StreamingCheckpointIO(progress_bytes=4000).load_checkpoint(tmp_path / "large.ckpt")
    shown = capfd.readouterr().err
    assert "saving large.ckpt" in shown
    assert "verifying large.ckpt" in shown
