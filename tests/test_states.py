"""`state_dtype`: what BF16 and 8-bit moments do to training, memory, checkpoints and whoever reads the state."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload import kernels
from lightning_cpu_offload.offload import attach
from lightning_cpu_offload.offload.adam import state_bytes
from lightning_cpu_offload.offload.budget import needs
from lightning_cpu_offload.offload.moments import STATE_DTYPES, ReducedTensor
from tests import test_checkpoint as runs
from tests.models import quiet_trainer
from tests.net import Net, adamw, assert_free, batches, fit, offload, sgd, weights
from tests.reference import float8 as table
from tests.test_optimizers import Given

KINDS = ["bfloat16", "float8"]
ALL = ["float32", *KINDS]
NAMES = ["exp_avg", "exp_avg_sq"]

DISTANCE = {"bfloat16": 2**-7, "float8": 2**-3}
"""Of neighbouring numbers, relative to the smaller one."""


def moments(trainer: Any) -> dict[str, Tensor]:
    """Copies of all moments, in ordinary tensors."""
    state = trainer.optimizers[0].state_dict()["state"]
    return {f"{index}.{name}": state[index][name].clone() for index in state for name in NAMES}


def assert_equal_moments(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name}: {int((actual[name] != value).sum())} differ"


# --- the arithmetic -------------------------------------------------------------------------------------------------


class Rounded(torch.optim.AdamW):
    """torch's AdamW in FP32, with its moments rounded after each step as documented.

    Args:
        kind: `"bfloat16"` or `"float8"`.
        shift: Of the number of the step by which the dither is chosen; 0 is right.
        options: As for AdamW.
    """

    def __init__(self, params: Any, kind: str, shift: int = 0, **options: Any) -> None:
        super().__init__(params, **options)
        self.kind, self.shift, self.count = kind, shift, 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.count += 1
        held = [p for group in self.param_groups for p in group["params"] if p in self.state]
        for which, name in enumerate(NAMES):
            values = torch.cat([self.state[p][name].flatten() for p in held]).numpy()
            rounded = torch.from_numpy(self._round(values, which)).split([p.numel() for p in held])
            for p, part in zip(held, rounded, strict=True):
                self.state[p][name].copy_(part.view_as(p))
        return loss

    def _round(self, values: np.ndarray, which: int) -> np.ndarray:
        step = self.count + self.shift
        if self.kind == "float8":
            fractions = table.dithers(values.size, 0, seed=0, step=step)[which]
            blocks = range(0, values.size, 128)
            rounded = [table.round_block(values[i : i + 128], fractions[i : i + 128], which == 0) for i in blocks]
            return np.concatenate(rounded)
        places = np.arange(values.size, dtype=np.uint64)
        words = (0x9E39E377 * step + 0xC13FA9A9 * places) % 2**32
        fractions = words >> (16, 4)[which] & 0xFFFF
        return ((values.view(np.uint32) + fractions) >> 16 << 16).astype(np.uint32).view(np.float32)


def assert_as_rounded(make: Callable[[str], Any], kind: str, shift: int = 0, **options: Any) -> None:
    """Five steps of the strategy are those of `Rounded`, but for a few roundings.

    The kernel's FP32 moments differ from torch's in the last bit, which takes about one number in 1,000 to the other
    side of its dither; the next steps go on from there.
    """
    ours, expected = make("ours"), make("rounded")
    clip = {"gradient_clip_val": 0.5}
    trainer = fit(ours, None, number=5, strategy=offload("32-true", state_dtype=kind, **options), **clip)
    rounding = fit(expected, None, number=5, **clip)
    actual, wanted = moments(trainer), moments(rounding)
    assert actual.keys() == wanted.keys()
    same = {name: torch.isclose(actual[name], value, rtol=1e-5, atol=1e-30) for name, value in wanted.items()}
    total = sum(each.numel() for each in same.values())
    differing = total - sum(int(each.sum()) for each in same.values())
    assert differing <= 0.02 * total, f"{differing} of {total} moments were rounded otherwise"
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=2 * DISTANCE[kind], atol=1e-8, msg=name)
    for (name, value), own in zip(expected.named_parameters(), ours.parameters(), strict=True):
        # A step is at most about lr = 0.01; one rounded otherwise changes it by a distance.
        torch.testing.assert_close(own, value, rtol=1e-5, atol=0.01 * DISTANCE[kind], msg=name)


def given(kind: str, which: str, shift: int = 0, base: Any = Given, **options: Any) -> Net:
    """The net for one of the two runs; its gradients do not depend on its weights."""
    if which == "ours":
        return base(partial(adamw, **options))
    return base(lambda module: Rounded(module.parameters(), kind, shift, **{"lr": 0.01, **options}))


WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"gradients": "host"},
    "delayed": {"update": "delayed", "exact_steps": 1},
    "two threads": {"cpu_threads": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_adamws_with_moments_rounded_by_the_dither(kind: str, way: str) -> None:
    assert_as_rounded(partial(given, kind, weight_decay=0.1), kind, **WAYS[way])


@pytest.mark.parametrize("kind", KINDS)
def test_comparison_notices_the_dither_of_another_step(kind: str) -> None:
    with pytest.raises(AssertionError, match="rounded otherwise"):
        assert_as_rounded(partial(given, kind, shift=1), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_comparison_notices_moments_that_are_not_rounded(kind: str) -> None:
    with pytest.raises(AssertionError, match="rounded otherwise"):
        assert_as_rounded(partial(given, kind), "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_steps_under_backward_have_the_bits_of_exact_ones(kind: str) -> None:
    results = []
    for update in ("exact", "early"):
        module = Net(adamw)
        trainer = fit(module, None, 5, strategy=offload(state_dtype=kind, update=update, nonfinite="raise"))
        results.append((moments(trainer), weights(module)))
    assert_equal_moments(results[1][0], results[0][0])
    assert_equal_moments(results[1][1], results[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_on_the_device_stays_in_fp32(kind: str) -> None:
    results = {}
    for name, options in {
        kind: {"state_dtype": kind},
        "partly": {"state_dtype": kind, "device_fraction": 0.5},
        "float32": {},
    }.items():
        trainer = fit(Given(adamw), None, 5, strategy=offload("32-true", **options))
        results[name] = moments(trainer)
    on_device = [name for name, value in results["partly"].items() if not torch.equal(value, results[kind][name])]
    assert 0 < len(on_device) < len(results[kind])
    for name in on_device:
        # FP32 steps of torch and of the kernel differ in the last bits.
        torch.testing.assert_close(results["partly"][name], results["float32"][name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_small_chunks_have_the_bits_of_large_ones(kind: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for slot_bytes in (64 << 10, 8):
        monkeypatch.setattr(attach, "SMALL_SLOT_BYTES", slot_bytes)
        module = Wide()
        chunks: list[int] = []

        def count(trainer: Any, module: Any, chunks: list[int] = chunks) -> None:
            chunks += [len(region.chunks) for region in trainer.strategy.offload.regions]

        trainer = fit(module, None, strategy=offload(precision, state_dtype=kind), on_train_start=count)
        results.append((moments(trainer), weights(module), sum(chunks)))
    (whole, whole_weights, few), (cut, cut_weights, many) = results
    assert many > few
    assert_equal_moments(cut, whole)
    assert_equal_moments(cut_weights, whole_weights)


class Wide(Net):
    """Odd sizes: 300 and 37 elements to a row."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.more = nn.ParameterList([nn.Parameter(torch.full((7, 300), 0.5)), nn.Parameter(torch.ones(37))])

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) + sum(parameter.square().mean() for parameter in self.more)


def test_chunks_end_where_blocks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "SMALL_SLOT_BYTES", 8)
    seen: list[int] = []

    def look(trainer: Any, module: Any) -> None:
        seen.extend(chunk.start for region in trainer.strategy.offload.regions for chunk in region.chunks)

    fit(Wide(), None, strategy=offload(state_dtype="float8"), on_train_start=look)
    assert any(seen)
    assert all(start % 128 == 0 for start in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_are_not_finite_leave_the_moments(kind: str) -> None:
    seen: list[dict[str, Tensor]] = []

    class Broken(Net):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 2:
                self.inner.weight.grad[0, 0] = float("nan")  # type: ignore[index]

    def look(trainer: Any, *_: Any) -> None:
        seen.append(moments(trainer))

    with pytest.warns(UserWarning, match="not finite"):
        fit(Broken(adamw), None, 4, strategy=offload(state_dtype=kind), on_train_batch_end=look)
    assert_equal_moments(seen[2], seen[1])
    assert all(value.isfinite().all() for value in seen[3].values())
    assert not torch.equal(seen[3]["0.exp_avg"], seen[2]["0.exp_avg"])


# --- beside FP32, over a run ----------------------------------------------------------------------------------------


class Regressor(Net):
    """Learns one linear map of its inputs from few, noisy batches."""

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x[:, :4] + x[:, 4:].flip(1)).square().mean()


def end_of_training(kind: str) -> float:
    module = Regressor(adamw)
    fit(module, None, 30, strategy=offload("32-true", state_dtype=kind), max_epochs=10)
    return float(torch.stack(module.losses[-30:]).mean())


@pytest.mark.slow
def test_losses_end_where_those_of_fp32_end() -> None:
    ends = {kind: end_of_training(kind) for kind in ALL}
    assert ends["float32"] < 0.5 * end_of_first_epoch()
    # Once measured: 0.03 % and 0.24 %.
    assert ends["bfloat16"] == pytest.approx(ends["float32"], rel=0.005)
    assert ends["float8"] == pytest.approx(ends["float32"], rel=0.01)


def end_of_first_epoch() -> float:
    module = Regressor(partial(adamw, lr=0.0))
    fit(module, None, 30, strategy=offload("32-true"))
    return float(torch.stack(module.losses).mean())


# --- memory ---------------------------------------------------------------------------------------------------------


def held_bytes(kind: str) -> tuple[dict[str, int], list[int]]:
    """Bytes on the host by purpose, and the sizes of the regions."""
    seen: list[Any] = []

    def look(trainer: Any, module: Any) -> None:
        offloaded = trainer.strategy.offload
        seen.extend([dict(offloaded.memory.bytes_by_name), [region.numel for region in offloaded.regions]])

    fit(Wide(), None, strategy=offload(state_dtype=kind), on_train_start=look)
    return seen[0], seen[1]


def test_bytes_are_counted_exactly() -> None:
    words = {kind: held_bytes(kind) for kind in ALL}
    sizes = words["float32"][1]
    assert all(numels == sizes for _, numels in words.values())
    total = sum(sizes)
    assert {held["masters"] for held, _ in words.values()} == {4 * total}
    assert words["float32"][0]["moments"] == 8 * total
    assert words["bfloat16"][0]["moments"] == sum(2 * 4 * -(-2 * n // 4) for n in sizes)
    assert words["float8"][0]["moments"] == sum(2 * 4 * -(-n // 4) + 4 * -(-n // 128) for n in sizes)


@pytest.mark.parametrize(("kind", "per_parameter"), [("bfloat16", 8), ("float8", 6 + 1 / 32)])
def test_a_large_region_takes_what_the_readme_says(kind: str, per_parameter: float) -> None:
    optimizer = adamw(nn.Linear(2, 2))
    numel = 1 << 20
    state = state_bytes(optimizer, kind) * numel
    assert needs(weight_bytes=0, numel=numel, state_bytes=int(state)).host == per_parameter * numel


def test_the_plan_and_what_would_help_speak_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Net(adamw), None, strategy=offload(state_dtype="float8"))
    assert "AdamW by one-pass kernel with float8 moments" in caplog.text


# --- checkpoints ----------------------------------------------------------------------------------------------------


def strategy_of(kind: str, **options: Any) -> Any:
    return "auto" if kind == "stock" else offload("32-true", state_dtype=kind, **options)


@pytest.mark.parametrize("way", ["device", "host", "delayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, kind: str, way: str) -> None:
    # A resumed run begins with exact steps, if there are any.
    options = {**WAYS[way], **({"exact_steps": 0} if way == "delayed" else {})}
    make = partial(offload, "bf16-mixed", state_dtype=kind, **options)
    path = tmp_path / "half.ckpt"
    whole = Net(adamw)

    def save(trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(path)

    whole_trainer = fit(whole, None, strategy=make(), max_epochs=4, on_train_epoch_end=save)
    resumed = Net(adamw)
    trainer = quiet_trainer(strategy=make(), max_epochs=4, limit_val_batches=0)
    trainer.fit(resumed, batches(), ckpt_path=path, weights_only=True)
    assert_equal_moments(moments(trainer), moments(whole_trainer))
    assert_equal_moments(weights(resumed), weights(whole))
    assert len(resumed.losses) == 6
    runs.assert_same(resumed.losses, whole.losses[6:])


@pytest.mark.parametrize("second", [*ALL, "stock"])
@pytest.mark.parametrize("first", [*ALL, "stock"])
def test_checkpoints_convert_between_all_pairs(tmp_path: Path, first: str, second: str) -> None:
    before, trainer = runs.fit(strategy_of(first), 2)
    path = tmp_path / "half.ckpt"
    trainer.save_checkpoint(path)
    after, after_trainer = runs.fit(strategy_of(second), 2, path)  # nothing is left to train
    runs.assert_same(dict(after.state_dict()), dict(before.state_dict()))
    actual, expected = moments(after_trainer), moments(trainer)
    assert any(value.abs().max() > 1e-3 for value in expected.values())
    exact = second in (first, "float32", "stock") or (first, second) == ("float8", "bfloat16")
    for name, value in expected.items():
        if exact:
            assert torch.equal(actual[name], value), name
        else:
            # Of a block's largest number, 2**-15 is the smallest first moment that is kept.
            torch.testing.assert_close(actual[name], value, rtol=DISTANCE[second], atol=2**-14, msg=name)
    continued, _ = runs.fit(strategy_of(second), 3, path)
    assert torch.stack(continued.losses).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_file_is_that_of_a_stock_run(tmp_path: Path, kind: str) -> None:
    saved = {}
    for name in (kind, "stock"):
        _, trainer = runs.fit(strategy_of(name), 2)
        trainer.save_checkpoint(tmp_path / name)
        saved[name] = torch.load(tmp_path / name, weights_only=True)["optimizer_states"][0]
    assert saved[kind]["param_groups"] == saved["stock"]["param_groups"]
    for index, state in saved["stock"]["state"].items():
        own = saved[kind]["state"][index]
        assert list(own) == list(state)
        for name, value in state.items():
            assert type(own[name]) is Tensor
            assert (own[name].dtype, own[name].shape, own[name].stride()) == (value.dtype, value.shape, value.stride())
            assert own[name].untyped_storage().nbytes() == value.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", KINDS)
def test_saving_decodes_one_tensor_at_a_time(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    largest = [0]
    decode = ReducedTensor.decode

    def watched(self: ReducedTensor) -> Tensor:
        largest[0] = max(largest[0], sum(ref() is not None for ref in alive))
        plain = decode(self)
        alive.append(weakref.ref(plain.untyped_storage()))
        return plain

    _, trainer = runs.fit(strategy_of(kind), 1)
    monkeypatch.setattr(ReducedTensor, "decode", watched)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert len(alive) == 2 * len(trainer.optimizers[0].state)
    assert largest[0] <= 1  # the one before, which torch lets go of when it has the next one


def test_loaded_numbers_do_not_lose_digits_to_larger_ones_before_them() -> None:
    def load(trainer: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0]
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            for name in NAMES:
                entry[name] = torch.full_like(entry[name], 2.0**-30)
        optimizer.load_state_dict(state)
        for entry in optimizer.state_dict()["state"].values():
            for name in NAMES:
                assert (entry[name] == 2.0**-30).all()

    strategy = offload("32-true", state_dtype="float8")
    fit(Net(partial(adamw, lr=0.0)), None, 1, strategy=strategy, on_train_batch_end=load)


# --- whoever reads the state ----------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def shown(request: pytest.FixtureRequest) -> Any:
    """An `exp_avg` in `optimizer.state` of a run that has ended, (16, 8)."""
    trainer = fit(Net(adamw), None, strategy=offload("32-true", state_dtype=request.param))
    optimizer = trainer.optimizers[0]
    return optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]


def test_reads_as_an_fp32_tensor(shown: Tensor) -> None:
    assert isinstance(shown, Tensor)
    assert (shown.dtype, shown.device.type, shown.shape) == (torch.float32, "cpu", (16, 8))
    plain = shown.clone()
    assert type(plain) is Tensor
    assert plain.abs().max() > 0
    for same in (shown * 1, shown.numpy(), shown.tolist(), copy.deepcopy(shown), pickle.loads(pickle.dumps(shown))):
        assert torch.equal(torch.as_tensor(same), plain)
    assert torch.equal(shown.T, plain.T)
    assert torch.equal(shown[3:5], plain[3:5])
    assert torch.equal(torch.stack([shown, shown]), torch.stack([plain, plain]))
    file = io.BytesIO()
    torch.save({"once": shown, "again": shown}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert torch.equal(loaded["once"], plain)
    assert loaded["again"] is loaded["once"]


def test_writes_count(shown: Tensor) -> None:
    zeros = torch.zeros(16, 8)
    assert shown.fill_(0.5) is shown
    assert torch.equal(shown, zeros + 0.5)
    shown.mul_(2)
    shown[3] = 0.25
    zeros += 1
    zeros[3] = 0.25
    assert torch.equal(shown, zeros)
    shown.detach().add_(zeros)
    assert torch.equal(shown, 2 * zeros)
    shown.copy_(zeros.T.contiguous().T)
    assert torch.equal(shown, zeros)
    shown.zero_()
    assert not shown.any()


def test_has_no_address(shown: Tensor) -> None:
    with pytest.raises(RuntimeError, match="has no address; clone it first"):
        shown.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_layout_of_the_parameter_is_kept(kind: str) -> None:
    class Channels(Net):
        def __init__(self) -> None:
            super().__init__(adamw)
            self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x) + self.conv(x.new_ones(1, 3, 4, 4).cumsum(2)).square().mean()

    module, plain = Channels(), Channels()
    plain.load_state_dict(module.state_dict())
    trainer = fit(module, None, 1, strategy=offload("32-true", state_dtype=kind))
    expected = fit(plain, None, 1)
    for own, value in zip(moments(trainer).values(), moments(expected).values(), strict=True):
        torch.testing.assert_close(own, value, rtol=DISTANCE[kind] * 1.01, atol=2**-14)
    state = trainer.optimizers[0].state[module.conv.weight]["exp_avg"]
    assert state.stride() == module.conv.weight.stride() != module.conv.weight.contiguous().stride()


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_and_cleared_state_counts(kind: str) -> None:
    seen = []

    class Resets(Given):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.trainer.optimizers[0]
            state = optimizer.state[self.inner.weight]
            if batch_idx == 1:
                state["exp_avg"] = torch.full((16, 8), 64.0)
            elif batch_idx == 2:
                seen.append(state["exp_avg"].clone())
                state.clear()
            elif batch_idx == 3:
                seen.append(state["exp_avg"].clone())
                assert state["step"] == 1

    fit(Resets(adamw), None, 4, strategy=offload("32-true", state_dtype=kind))
    # The mean of 64 after one step with beta1 = 0.9 and gradients of about 1; and 0.1 of one gradient.
    torch.testing.assert_close(seen[0], torch.full((16, 8), 57.6), rtol=DISTANCE[kind], atol=1.0)
    assert 0 < seen[1].abs().max() < 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["device", "delayed"])
def test_reading_waits_for_the_step(kind: str, way: str) -> None:
    seen: dict[str, list[Tensor]] = {}
    for name in ("device", way):
        read = seen.setdefault(name + str(len(seen)), [])

        def look(trainer: Any, module: Any, *_: Any, read: list[Tensor] = read) -> None:
            read.append(trainer.optimizers[0].state[module.inner.weight]["exp_avg"].clone())

        strategy = offload("32-true", state_dtype=kind, **WAYS[name])
        fit(Given(adamw), None, 5, strategy=strategy, on_train_batch_end=look)
    first, second = seen.values()
    assert len(first) == 5
    runs.assert_same(second, first)


@pytest.mark.parametrize("kind", KINDS)
def test_after_fit_the_optimizer_is_free_and_steps(kind: str) -> None:
    module = Net(adamw)
    trainer = fit(module, None, strategy=offload(state_dtype=kind))
    optimizer = trainer.optimizers[0]
    assert_free(optimizer, module)
    before, first = weights(module), moments(trainer)
    module.loss(torch.ones(4, 8)).backward()
    optimizer.step()
    assert not torch.equal(module.inner.weight, before["inner.weight"])
    assert not torch.equal(moments(trainer)["0.exp_avg"], first["0.exp_avg"])


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_another_optimizer(kind: str) -> None:
    trainer = fit(Net(adamw), None, strategy=offload("32-true", state_dtype=kind))
    other = adamw(Net())
    other.load_state_dict(trainer.optimizers[0].state_dict())
    state = other.state_dict()["state"]
    assert_equal_moments({f"{i}.{name}": state[i][name].clone() for i in state for name in NAMES}, moments(trainer))


# --- refusals -------------------------------------------------------------------------------------------------------


class OwnAdamW(torch.optim.AdamW):
    """A subclass, which may step differently."""


@pytest.mark.parametrize(
    ("optimizer", "found"),
    [
        (sgd, "SGD"),
        (partial(adamw, amsgrad=True), "AdamW, amsgrad"),
        (lambda module: OwnAdamW(module.parameters()), "OwnAdamW"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_optimizers_are_refused_before_training(kind: str, optimizer: Any, found: str) -> None:
    module = Net(optimizer)
    with pytest.raises(ValueError, match=rf"state_dtype='{kind}': for torch\.optim\.AdamW and Adam .* is {found}"):
        fit(module, None, strategy=offload(state_dtype=kind))
    assert not module.losses


def test_amsgrad_switched_on_in_training_is_refused() -> None:
    class Switches(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.optimizers[0].param_groups[0]["amsgrad"] = True

    module = Switches(adamw)
    with pytest.raises(ValueError, match=r"state_dtype='float8'.*AdamW, amsgrad"):
        fit(module, None, 4, strategy=offload(state_dtype="float8"))
    assert len(module.losses) == 3


def test_machines_without_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "IMPORT_ERROR", ImportError("No module named 'numba'"))
    with pytest.raises(ValueError, match=r"state_dtype='bfloat16': needs the compiled kernels.*numba"):
        fit(Net(adamw), None, strategy=offload(state_dtype="bfloat16"))


@pytest.mark.parametrize("value", ["int8", "float16", None, torch.bfloat16])
def test_other_dtypes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"state_dtype=.*one of 'float32', 'bfloat16', 'float8'"):
        offload(state_dtype=value)


def test_kinds_are_those_of_the_kernels() -> None:
    assert list(kernels.MOMENTS) == KINDS
    assert list(STATE_DTYPES) == ALL
