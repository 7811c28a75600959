"""The tracker against the profiler's real peaks, and what the 458M model needs."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lightning_cpu_offload.estimate.allocator import reserved_peak
from lightning_cpu_offload.estimate.memory import CannotRun, Choice, Compute, DeviceMemory, device_memory
from lightning_cpu_offload.precision import CPUOffloadPrecision
from lightning_cpu_offload.recipes import GPT
from tests.estimate_models import SAMPLES, Sample, Trained

CASES = [
    *((name, "device") for name in SAMPLES),
    *(pytest.param(name, "host", marks=pytest.mark.slow) for name in SAMPLES),
]
IN_FLIGHT = 1 << 18


def compute(precision: str) -> Compute:
    plugin = CPUOffloadPrecision(precision)  # type: ignore[arg-type]
    plugin.choose(torch.device("cpu"))
    return Compute(plugin.dtype_of, plugin.forward_context, plugin.convert_input)


class Optimizer:
    """Stands in for an optimizer of a manual step: gradients are left as they are, as in the estimate."""

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        pass


def real_peak(sample: Sample, gradients: str, micro_batches: int = 2) -> int:
    """The most bytes in use in a real run on the CPU: what lies there before, and what the profiler saw beyond it."""
    torch.manual_seed(0)
    module, batch = sample.module(), sample.batch()
    module.log = module.log_dict = lambda *_args, **_kwargs: None
    module.optimizers = lambda: [Optimizer(), Optimizer()]
    module.manual_backward = lambda loss: loss.backward()
    in_flight: list[Tensor] = []

    def leave(parameter: Tensor) -> None:
        in_flight.append(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None
        while len(in_flight) > 1 and sum(gradient.nbytes for gradient in in_flight) > IN_FLIGHT:
            del in_flight[0]

    for parameter in module.parameters():
        if parameter.requires_grad and gradients == "host":
            parameter.register_post_accumulate_grad_hook(leave)
    onednn, backends = sample.onednn, torch.backends.mkldnn
    with backends.flags(enabled=onednn), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for index in range(micro_batches):
            output = module.training_step(batch, index)
            loss = output["loss"] if isinstance(output, dict) else output
            if loss is not None:
                loss.backward()
            del output, loss
    before = torch.utils._pytree.tree_leaves([batch, *module.parameters(), *module.buffers()])
    return sum(tensor.nbytes for tensor in before) + _peak_of(profiler)


def _peak_of(profiler: Any) -> int:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    used = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak


def estimated(sample: Sample, gradients: Any) -> DeviceMemory:
    choice = Choice(gradients=gradients, in_flight_bytes=IN_FLIGHT, round_to=1)
    with torch.device("meta"):
        module, batch = sample.module(), sample.batch()
    return device_memory(module, batch, Compute(), choice, optimizers=2)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize(("name", "gradients"), CASES)
def test_within_three_percent_of_the_profiler(name: str, gradients: str) -> None:
    real, predicted = real_peak(SAMPLES[name], gradients), estimated(SAMPLES[name], gradients).peak
    # What an operation allocates and frees within itself does not show in the estimate.
    assert abs(predicted / real - 1) < 0.03, (predicted, real)


def test_the_comparison_notices_a_gradient_kept_too_long() -> None:
    sample = SAMPLES["mixture of experts"]
    assert abs(estimated(sample, "device").peak / real_peak(sample, "host") - 1) > 0.03


class TestWhatIsSeen:
    def test_gradients_stay_in_one_way_and_leave_in_the_other(self) -> None:
        sample = SAMPLES["gpt"]
        module = sample.module()
        weights = sum(parameter.nbytes for parameter in module.parameters())
        stay, leave = estimated(sample, "device"), estimated(sample, "host")
        assert stay.by_category["weights"] == leave.by_category["weights"] == weights
        assert stay.by_category["gradients"] == weights
        assert "gradients" not in leave.by_category
        largest = max(parameter.nbytes for parameter in module.parameters())
        assert 0 < leave.by_category["in flight"] <= max(IN_FLIGHT, largest)
        assert sum(stay.by_category.values()) == stay.peak
        assert stay.by_category["logits"] > 0

    def test_checkpointing_of_any_repeated_block(self) -> None:
        sample = SAMPLES["torch's encoder"]
        with torch.device("meta"):
            module, batch = sample.module(), sample.batch()
        plain = device_memory(module, batch, Compute(), Choice())
        again = device_memory(module, batch, Compute(), Choice(checkpointing=True))
        assert again.by_category["activations"] < 0.7 * plain.by_category["activations"]
        assert again.backward_flops > 1.4 * plain.backward_flops
        assert "forward" not in vars(module.encoder.layers[0])

    def test_operations_of_a_matrix(self) -> None:
        with torch.device("meta"):
            module, batch = SAMPLES["mixture of experts"].module(), SAMPLES["mixture of experts"].batch()
        result = device_memory(module, batch, Compute(), Choice())
        assert result.forward_flops["experts.0.0.weight"] == 2 * 512 * 256 * 512
        assert result.backward_flops == pytest.approx(2 * sum(result.forward_flops.values()), rel=0.25)

    def test_values_are_guessed_and_named(self) -> None:
        with torch.device("meta"):
            module, batch = SAMPLES["masked language model"].module(), SAMPLES["masked language model"].batch()
        assert device_memory(module, batch, Compute(), Choice()).guesses == ("aten._local_scalar_dense.default",)

    def test_the_allocator_reserves_no_less_than_is_used(self) -> None:
        result = estimated(SAMPLES["cnn"], "device")
        assert result.peak <= result.reserved <= result.peak + 3 * (20 << 20)

    def test_the_module_is_left_as_it_was(self) -> None:
        module, batch = SAMPLES["lstm"].module(), SAMPLES["lstm"].batch()
        before = {name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
        flat = list(module.recurrent._flat_weights)
        attributes = set(vars(module))
        device_memory(module, batch, compute("bf16-mixed"), Choice())
        for name, tensor in module.state_dict(keep_vars=True).items():
            assert tensor is before[name][0]
            assert torch.equal(tensor, before[name][1])
            assert tensor.grad is None
            assert not tensor._post_accumulate_grad_hooks
        assert all(now is then for now, then in zip(module.recurrent._flat_weights, flat, strict=True))
        assert set(vars(module)) == attributes
        assert "_trainer" not in vars(module) or vars(module)["_trainer"] is None

    def test_mixed_precision_halves_matrices_only(self) -> None:
        with torch.device("meta"):
            module, batch = SAMPLES["gpt"].module(), SAMPLES["gpt"].batch()
        matrices = sum(p.numel() for p in module.parameters() if p.ndim > 1)
        vectors = sum(p.numel() for p in module.parameters() if p.ndim == 1)
        choice = Choice(round_to=1)
        mixed = device_memory(module, batch, compute("bf16-mixed"), choice).by_category
        pure = device_memory(module, batch, compute("bf16-true"), choice).by_category
        assert mixed["weights"] == 2 * matrices + 4 * vectors
        assert pure["weights"] == 2 * matrices + 2 * vectors


class Stubborn(Trained):
    """Its step needs data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.data_ptr()
        raise NotImplementedError("a kernel of its own")


def test_a_step_that_cannot_run_says_where() -> None:
    module = Stubborn()
    weight = module.layer.weight
    with pytest.raises(CannotRun, match="Stubborn, forward: "):
        device_memory(module, torch.zeros(2, 4), Compute(), Choice())
    assert module.layer.weight is weight


@pytest.mark.slow
class TestTheModelOfTheStory:
    """458M parameters, batch 1, 512 tokens, checkpointing, loss in chunks; 64 MiB of gradients in flight."""

    @pytest.mark.parametrize(("gradients", "limit"), [("device", 2_100_000_000), ("host", 1_130_000_000)])
    def test_peak(self, gradients: Any, limit: int) -> None:
        with torch.device("meta"):
            module = GPT(
                num_layers=24,
                d_model=1152,
                num_heads=16,
                vocab_size=32000,
                context_length=1024,
                tied=False,
                activation_checkpointing=True,
                loss_chunks=8,
            )
            batch = torch.zeros(2, 1, 512, dtype=torch.long).unbind()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = device_memory(module, batch, compute("bf16-true"), Choice(gradients=gradients))
        assert 915_000_000 < result.peak <= limit
        assert result.by_category["weights"] == pytest.approx(2 * 457_475_328, rel=1e-3)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # in KiB: nothing is allocated


class TestAllocator:
    def test_small_blocks_share_a_segment(self) -> None:
        assert reserved_peak([(index, 512) for index in range(4096)]) == 2 << 20
        assert reserved_peak([(index, 512) for index in range(4097)]) == 4 << 20

    def test_large_blocks_have_their_own_in_steps_of_2_mib(self) -> None:
        assert reserved_peak([(0, (10 << 20) + 512), (1, 30 << 20)]) == (12 << 20) + (30 << 20)

    def test_what_was_freed_is_used_again_and_joined(self) -> None:
        sizes = [4 << 20, 6 << 20, 10 << 20 >> 1]
        trace = [(index, size) for index, size in enumerate(sizes)]
        assert reserved_peak(trace) == 20 << 20
        freed = [(0, -sizes[0]), (1, -sizes[1])]
        assert reserved_peak([*trace, *freed, (3, 9 << 20)]) == 20 << 20  # 4 and 6 MiB beside each other
        assert reserved_peak([*trace, freed[0], (3, 9 << 20)]) == 40 << 20
