from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_cpu_offload import CPUOffloadDDPStrategy, CPUOffloadStrategy, OffloadMonitor
from lightning_cpu_offload.__main__ import main
from lightning_cpu_offload.cli import OffloadCLI, count_parameters
from lightning_cpu_offload.namespaces import pl
from tests.conftest import ROOT

CONFIGS = sorted(ROOT.glob("configs/*.yaml"))

ONE_PROCESS = ["--trainer.devices=1"]
"""Lightning's launcher would start this process's own command line once more for each further device."""


def test_the_configs_are_found() -> None:
    assert {path.stem for path in CONFIGS} >= {"gpt_small", "gpt_small_baseline", "gpt_small_ddp", "gpt_458m"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("subcommand", ["fit", "validate"])
def test_config_parses(config: Path, subcommand: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([subcommand, "--config", str(config), "--print_config"])
    assert not stop.value.code
    parsed = yaml.safe_load(capsys.readouterr().out)
    assert_holds(parsed, yaml.safe_load(config.read_text()))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(config: Path, root: Path) -> None:
    cli = build(config)
    expected = yaml.safe_load(config.read_text())
    kinds = {"cpu_offload": CPUOffloadStrategy, "cpu_offload_ddp": CPUOffloadDDPStrategy}
    for name, kind in kinds.items():
        assert isinstance(cli.trainer.strategy, kind) == (expected["trainer"]["strategy"] == name)
    assert any(isinstance(callback, OffloadMonitor) for callback in cli.trainer.callbacks)
    (logger,) = cli.trainer.loggers
    assert isinstance(logger, pl.loggers.TensorBoardLogger)
    assert logger.root_dir == str(Path("logs") / config.stem)
    assert cli.model.hparams["vocab_size"] >= cli.datamodule.vocab_size
    assert cli.model.hparams["context_length"] >= cli.datamodule.context_length


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_trains(config: Path, root: Path, tiny_run: list[str]) -> None:
    small_words = ["--data.vocab_size=300", "--model.vocab_size=300"] if config.stem == "gpt_458m" else []
    cli = OffloadCLI(["fit", "--config", str(config), *tiny_run, *small_words, *ONE_PROCESS])
    assert cli.trainer.global_step == 2
    assert cli.trainer.callback_metrics["val/loss"] < cli.recorder.loss_before


def test_458m_has_the_parameters_its_name_says(root: Path) -> None:
    assert count_parameters(build(ROOT / "configs" / "gpt_458m.yaml").model) == 457_475_328


def test_baseline_differs_in_strategy_and_name_alone() -> None:
    ours, stock = (
        yaml.safe_load((ROOT / "configs" / name).read_text()) for name in ("gpt_small.yaml", "gpt_small_baseline.yaml")
    )
    assert stock["trainer"].pop("strategy") == "auto"
    assert stock["trainer"].pop("precision") == "32-true"
    assert ours["trainer"].pop("strategy") == "cpu_offload"
    for config in (ours, stock):
        assert config["trainer"]["logger"]["init_args"].pop("name")
    assert ours == stock


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_wrong_key_or_value_is_noticed(config: Path, root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    for old, new in (("  max_epochs: 1", "  max_epoch: 1"), ("num_heads: ", "num_heads: x"), ("batch_size", "size")):
        assert old in config.read_text()
        broken.write_text(config.read_text().replace(old, new))
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", str(broken), "--print_config"])
        assert stop.value.code


def test_assert_holds_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_holds({"a": [{"b": 1}]}, {"a": [{"b": 2}]})


def assert_holds(parsed: Any, written: Any) -> None:
    """`parsed` has everything that `written` has; class paths may have been completed."""
    if isinstance(written, dict):
        for key, value in written.items():
            if key == "class_path":
                assert parsed[key].endswith(value.rpartition(".")[2])
            else:
                assert_holds(parsed[key], value)
    elif isinstance(written, list):
        assert len(parsed) == len(written)
        for item, value in zip(parsed, written, strict=True):
            assert_holds(item, value)
    else:
        assert parsed == written


def build(config: Path) -> OffloadCLI:
    """Model, data and Trainer of a config, the model without memory."""
    with torch.device("meta"):
        return OffloadCLI(["--config", str(config), "--trainer.accelerator=cpu"], run=False)
