import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from lightning_cpu_offload import CPUOffloadStrategy
from lightning_cpu_offload.__main__ import main
from lightning_cpu_offload.cli import OffloadCLI, RunRecorder, count_parameters, peak_rss, report
from lightning_cpu_offload.namespaces import pl

Run = Callable[..., subprocess.CompletedProcess[str]]
SMALL = "configs/gpt_small.yaml"
REPORT = (
    r"validation loss before training: (?P<before>\d+\.\d{4})\n"
    r"validation loss after training: (?P<after>\d+\.\d{4})\n"
    r"ratio of after to before: (?P<ratio>\d+\.\d{4})\n"
    r"tokens/s: (?P<tokens>\d+\.\d)\n"
    r"peak RSS: (?P<rss>\d+) bytes, (?P<per_parameter>\d+\.\d\d) bytes per parameter\n"
    r"last checkpoint: (?P<checkpoint>.+)\n"
    r"TensorBoard log: (?P<log>.+)\n"
    r"to look at it: (?P<command>.*tensorboard) --logdir (?P<logdir>.+)\n\Z"
)


def test_fit_ends_with_the_report(run_module: Run, tiny_run: list[str], tmp_path: Path) -> None:
    done = run_module("fit", "--config", SMALL, *tiny_run)
    assert done.returncode == 0, done.stderr
    found = re.search(REPORT, done.stdout)
    assert found, done.stdout
    before, after = float(found["before"]), float(found["after"])
    # The loss of an untrained model over 256 bytes is near ln 256 = 5.5; both figures are rounded to 4 places.
    assert 5.0 < before < 6.5
    assert after < before
    assert float(found["ratio"]) == pytest.approx(after / before, abs=1e-4)
    assert float(found["tokens"]) > 0
    assert 50e6 < int(found["rss"]) < 8e9
    checkpoint = torch.load(found["checkpoint"], weights_only=True)
    assert checkpoint["global_step"] == 2
    parameters = sum(p.numel() for n, p in checkpoint["state_dict"].items() if n != "head.weight")
    assert float(found["per_parameter"]) == pytest.approx(int(found["rss"]) / parameters, abs=0.01)
    assert Path(found["log"]).parent == Path(found["logdir"]) == tmp_path / "logs" / "gpt_small"
    assert list(Path(found["log"]).glob("events.out.tfevents.*"))


def test_report_pattern_can_fail() -> None:
    assert not re.search(REPORT, "validation loss before training: 5.5000\n")


def test_second_run_gets_its_own_folder(
    root: Path, tiny_run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in range(2):
        main(["fit", "--config", SMALL, *tiny_run])
        assert f"TensorBoard log: {tmp_path}/logs/gpt_small/version_{version}\n" in capsys.readouterr().out


def test_second_run_without_logger_does_not_overwrite_a_config(root: Path, tiny_run: list[str]) -> None:
    options = [option for option in tiny_run if not option.startswith("--trainer.logger")]
    without = ["--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false"]
    main(["fit", "--config", SMALL, *options, *without])
    with pytest.raises(RuntimeError, match="to NOT exist"):
        main(["fit", "--config", SMALL, *options, *without])


def test_validation_before_training_is_the_first_point_of_the_curve(root: Path, tiny_run: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cli = fit(["--config", SMALL, *tiny_run])
    events = EventAccumulator(cli.trainer.log_dir).Reload().Scalars("val/loss")
    assert [event.step for event in events] == [0, 2]
    # TensorBoard holds FP32.
    assert events[0].value == pytest.approx(cli.recorder.loss_before, rel=1e-7)


def test_validate_gives_the_loss_the_report_gave(root: Path, tiny_run: list[str]) -> None:
    cli = fit(["--config", SMALL, *tiny_run])
    after = float(cli.trainer.callback_metrics["val/loss"])
    checkpoint = cli.trainer.checkpoint_callback.last_model_path
    again = run(["validate", "--config", SMALL, *tiny_run, f"--ckpt_path={checkpoint}"])
    # Same weights (FP32 masters rounded to the compute dtype), same batches, same arithmetic: exact.
    assert float(again.trainer.callback_metrics["val/loss"]) == after


def test_tokens_are_those_of_the_batches(root: Path, tiny_run: list[str]) -> None:
    cli = fit(["--config", SMALL, *tiny_run])
    # 2 steps x 2 batches x 4 windows x 16 tokens
    assert (cli.recorder.items, cli.recorder.unit) == (2 * 2 * 4 * 16, "tokens")
    assert cli.recorder.seconds > 0


class Constant(pl.LightningModule):
    """Has no validation, no logger and three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.tied = self.weight

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight - batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)


def test_what_a_run_has_not_is_left_out_of_the_report(tmp_path: Path) -> None:
    recorder, module = RunRecorder(), Constant()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[recorder],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    names = [line.split(": ")[0] for line in report(trainer, module, recorder)]
    assert names == ["samples/s", "peak RSS"]
    assert recorder.items == 4
    assert count_parameters(module) == 3


def test_peak_rss_grows_with_what_is_held() -> None:
    grown = torch.zeros(peak_rss() // 4 + (1 << 26))  # FP32: more than the peak so far, and 256 MiB
    assert peak_rss() >= grown.nbytes


@pytest.mark.slow
def test_unknown_path_is_refused_before_training(run_module: Run, tiny_run: list[str], tmp_path: Path) -> None:
    done = run_module("fit", "--config", SMALL, *tiny_run, "--data.path=/nowhere/text")
    assert done.returncode
    assert "path='/nowhere/text': does not exist. Give a text file or a folder of text files." in done.stderr
    assert not (tmp_path / "logs").exists()


def test_missing_model_says_how_to_give_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 2
    assert "Give --model package.module.Class, or --config with a file that names one" in capsys.readouterr().err


def test_other_errors_do_not_speak_of_a_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--config", SMALL, "--trainer.max_steps=many"])
    error = capsys.readouterr().err
    assert "trainer.max_steps" in error
    assert "--model package.module.Class" not in error


def test_strategy_by_class_path(root: Path, tiny_run: list[str]) -> None:
    strategy = ["--trainer.strategy=lightning_cpu_offload.CPUOffloadStrategy", "--trainer.strategy.cpu_threads=1"]
    cli = fit(["--config", SMALL, *tiny_run, *strategy])
    assert isinstance(cli.trainer.strategy, CPUOffloadStrategy)
    assert cli.trainer.global_step == 2


def test_console_script_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="lightning-cpu-offload")
    assert script.load() is main


@pytest.mark.slow
def test_console_script_and_module_print_the_same(run_module: Run) -> None:
    script = Path(sys.executable).with_name("lightning-cpu-offload")
    by_script = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=300)
    by_module = run_module("--help")
    assert by_script.returncode == by_module.returncode == 0
    assert by_script.stdout == by_module.stdout
    for subcommand in ("fit", "validate", "test", "predict"):
        assert re.search(rf"^ +{subcommand} ", by_module.stdout, re.MULTILINE)


@pytest.mark.slow
def test_fit_where_pytorch_lightning_stands_alone(root: Path, tiny_run: list[str]) -> None:
    block = "import sys; sys.modules['lightning'] = None"
    program = f"{block}; from lightning_cpu_offload.__main__ import main; main()"
    command = [sys.executable, "-c", program, "fit", "--config", SMALL, *tiny_run]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(REPORT, done.stdout), done.stdout


def fit(words: list[str]) -> OffloadCLI:
    return run(["fit", *words])


def run(words: list[str]) -> OffloadCLI:
    return OffloadCLI(words)
