"""Host memory: the bytes that were promised and no others, and nothing for forked children."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import os
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cpu_offload.kernels import ThreadPool
from lightning_cpu_offload.kernels.adamw import SHARE
from lightning_cpu_offload.offload import attach, memory
from lightning_cpu_offload.offload.attach import Attachment
from lightning_cpu_offload.offload.memory import HUGE_BYTES, HostArena, HostMemory, allocate_ring
from lightning_cpu_offload.offload.pipeline import RING_DEPTH, Pipeline
from lightning_cpu_offload.offload.settings import Settings
from lightning_cpu_offload.offload.transfer import InlineEngine

CPU = torch.device("cpu")
SLOT_BYTES = 64

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Ledger:
    """Counts what memory.py takes from the system: anonymous mappings, and tensors made by `torch.empty`."""

    def __init__(self) -> None:
        self.maps: list[weakref.ref[mmap.mmap]] = []
        self.map_bytes: list[int] = []
        self.tensor_bytes: list[int] = []
        self.refuse_pinning = False

    @property
    def total(self) -> int:
        return sum(self.map_bytes) + sum(self.tensor_bytes)

    @property
    def living_map_bytes(self) -> int:
        gc.collect()
        return sum(size for size, ref in zip(self.map_bytes, self.maps, strict=True) if ref() is not None)

    def map(self, fileno: int, length: int, **options: Any) -> mmap.mmap:
        mapping = _MAP(fileno, length, **options)
        self.maps.append(weakref.ref(mapping))
        self.map_bytes.append(length)
        return mapping

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory and self.refuse_pinning:
            raise RuntimeError("CUDA error: out of memory")
        tensor = torch.empty(*args, **options)
        self.tensor_bytes.append(tensor.nbytes)
        return tensor


_MAP = mmap.mmap


class CountedTorch:
    """`torch` for memory.py, with `empty` counted."""

    def __init__(self, ledger: Ledger) -> None:
        self.empty = ledger.empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    ledger = Ledger()
    monkeypatch.setattr(mmap, "mmap", ledger.map)
    monkeypatch.setattr(memory, "torch", CountedTorch(ledger))
    monkeypatch.setattr(attach, "SLOT_BYTES", SLOT_BYTES)
    return ledger


def make_net() -> nn.Linear:
    """5 * 7 + 5 trained parameters, a frozen layer and an empty tensor."""
    net = nn.Linear(7, 5)
    net.add_module("frozen", nn.Linear(7, 7).requires_grad_(False))
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    return net


TRAINED = 5 * 7 + 5


def mixed(owner: nn.Module, tensor: Tensor, *_: Any) -> torch.dtype:
    """Matrices in BF16."""
    return torch.bfloat16 if tensor.ndim >= 2 else torch.float32


def host_only(net: nn.Module, optimizer: torch.optim.Optimizer) -> Attachment:
    return Attachment(net, [optimizer], CPU, mixed, Settings(cpu_threads=1))


def small(attachment: Attachment) -> int:
    """Bytes for the answers to a step's checks: one for each chunk and one more, and those outgrown."""
    return attachment.memory.bytes_by_name["checks"]


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def storage_bytes(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each storage counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that grows with the parameters."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return storage_bytes(value for value in values if isinstance(value, Tensor) and value.ndim > 0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_takes_twelve_bytes_per_trained_parameter_and_the_ring(kind: Any, ledger: Ledger) -> None:
    net = make_net()
    optimizer = kind(net.parameters())
    attachment = host_only(net, optimizer)
    ring = RING_DEPTH * SLOT_BYTES
    checks = 1 + sum(len(region.chunks) for region in attachment.regions)
    assert attachment.memory.bytes_by_name == {
        "masters": 4 * TRAINED,
        "moments": 8 * TRAINED,
        "ring": ring,
        "checks": checks,
    }
    assert (sum(ledger.map_bytes), sum(ledger.tensor_bytes)) == (12 * TRAINED, ring + checks)
    assert ledger.total == attachment.memory.nbytes
    step(net, optimizer)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad and parameter.numel()]
    masters = [attachment._masters[parameter].host for parameter in trained]
    assert storage_bytes(masters) + state_bytes(optimizer) == 12 * TRAINED


OTHERS: dict[str, tuple[Any, int]] = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0),
    "momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4),
    "amsgrad": (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), 12),
}
"""Optimizers that step themselves, and the bytes per parameter of torch's own state."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_take_a_master_a_gradient_and_their_own_state(name: str, ledger: Ledger) -> None:
    make, own_bytes = OTHERS[name]
    net = make_net()
    optimizer = make(net.parameters())
    attachment = host_only(net, optimizer)
    ring = RING_DEPTH * SLOT_BYTES
    assert attachment.memory.bytes_by_name == {
        "masters": 4 * TRAINED,
        "gradients": 4 * TRAINED,
        "ring": ring,
        "checks": small(attachment),
    }
    assert ledger.total == attachment.memory.nbytes
    step(net, optimizer)
    assert state_bytes(optimizer) == own_bytes * TRAINED


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_allocate_nothing_more(name: str, ledger: Ledger) -> None:
    net = make_net()
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(net.parameters()) if name == "adamw" else torch.optim.SGD(net.parameters(), lr=0.1)
    attachment = host_only(net, optimizer)
    before, total = dict(attachment.memory.bytes_by_name), ledger.total
    for _ in range(4):
        step(net, optimizer)
    assert ledger.total == total
    assert attachment.memory.bytes_by_name == before


def test_parameters_unfrozen_later_are_counted_when_they_come(ledger: Ledger) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    attachment = host_only(net, optimizer)
    net.get_submodule("frozen").requires_grad_(True)
    step(net, optimizer)
    step(net, optimizer)
    assert ledger.total == attachment.memory.nbytes
    assert attachment.memory.nbytes == 12 * (TRAINED + 7 * 7 + 7) + RING_DEPTH * SLOT_BYTES + small(attachment)


def test_after_detach_only_weights_and_state_are_kept(ledger: Ledger) -> None:
    for make, per_parameter in ((OTHERS["momentum"][0], 4), (torch.optim.AdamW, 12)):
        net = make_net()
        optimizer = make(net.parameters())
        attachment = host_only(net, optimizer)
        ring = weakref.ref(attachment.pipeline._slots[0].buffer)  # type: ignore[union-attr]
        step(net, optimizer)
        attachment.detach()
        del attachment
        assert ledger.living_map_bytes == per_parameter * TRAINED
        assert ring() is None
        del net, optimizer
        assert ledger.living_map_bytes == 0


def test_the_ledger_notices_what_is_not_counted(ledger: Ledger) -> None:
    kept = HostMemory()
    kept.arena("masters", 10)
    HostArena(3)
    assert ledger.total == kept.nbytes + 12


# --- views --------------------------------------------------------------------------------------------------------


class NotingPool(ThreadPool):
    """Notes what it is given, and who worked on it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.items: list[tuple[int, int]] = []
        self.workers: set[int] = set()

    def map(self, fn: Any, items: Any) -> list[Any]:
        barrier = threading.Barrier(2, timeout=30)

        def noted(item: tuple[int, int]) -> Any:
            self.items.append(item)
            self.workers.add(threading.get_ident())
            if item[0] < 2 * HUGE_BYTES:  # the first two parts: taken by two threads
                barrier.wait()
            return fn(item)

        return super().map(noted, items)


def test_pages_are_touched_first_by_the_threads_of_the_pool() -> None:
    pool, numel = NotingPool(), 5 * HUGE_BYTES // 4 + 77
    array = HostArena(numel, pool).array
    starts = [part * HUGE_BYTES for part in range(6)]
    assert sorted(pool.items) == list(zip(starts, [*starts[1:], 4 * numel], strict=True))
    assert len(pool.workers) == 2
    assert array.shape == (numel,)
    assert not array.any()


def test_parts_are_whole_shares_of_the_kernel() -> None:
    assert HUGE_BYTES // 4 % SHARE == 0


def make_view() -> tuple[HostArena, Tensor]:
    arena = HostArena(100_000)
    view = arena.tensor(500, (4, 5), (1, 4))
    view.copy_(torch.arange(20.0).view(4, 5))
    return arena, view


def test_a_view_lies_in_the_arena_and_has_a_storage_of_its_own_size() -> None:
    arena, view = make_view()
    assert view.stride() == (1, 4)
    assert torch.equal(view, torch.arange(20.0).view(4, 5))
    assert arena.array[500:520].tolist() == view.T.flatten().tolist()
    assert not arena.array[:500].any()
    assert not arena.array[520:].any()
    assert view.storage_offset() == 0
    assert view.untyped_storage().nbytes() == 80
    assert arena.flat(499, 502).tolist() == [0, 0, 5]


def test_saving_or_copying_a_view_takes_its_bytes_only() -> None:
    _, view = make_view()
    file = io.BytesIO()
    torch.save(view, file)
    assert file.tell() < 80 + 2000  # the archive's own records
    assert len(pickle.dumps(view)) < 80 + 2000
    for twin in (copy.deepcopy(view), copy.deepcopy(nn.Parameter(view)), view.clone()):
        assert twin.untyped_storage().nbytes() == 80
        assert twin.data_ptr() != view.data_ptr()
        assert torch.equal(twin.detach(), view)


def test_a_view_keeps_the_memory_it_lies_in() -> None:
    arena, view = make_view()
    alive = weakref.ref(arena)
    del arena
    gc.collect()
    assert alive() is None
    assert torch.equal(view, torch.arange(20.0).view(4, 5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_views_without_elements_are_fp32_whatever_the_default(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        view = HostArena(0).tensor(0, (0, 3), (3, 1))
    finally:
        torch.set_default_dtype(default)
    assert (view.dtype, view.shape) == (torch.float32, (0, 3))


# --- forked children ----------------------------------------------------------------------------------------------


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


def child_has(address: int) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns: torch's threads are not forked
        child = os.fork()
    if child == 0:
        os._exit(0 if is_mapped(address) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@linux
def test_children_do_not_inherit_masters_and_moments_until_training_is_over() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    attachment = host_only(net, optimizer)
    step(net, optimizer)
    tensors = [attachment._masters[parameter].host for parameter in net.parameters() if parameter.requires_grad]
    tensors += [optimizer.state[net.weight][name] for name in ("exp_avg", "exp_avg_sq")]
    addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
    assert len(addresses) >= 4
    assert all(map(is_mapped, addresses))
    assert not any(map(child_has, addresses))
    attachment.detach()
    assert all(map(child_has, addresses))


@linux
def test_children_inherit_ordinary_memory() -> None:
    assert child_has(torch.ones(1000).data_ptr())


# --- page-locking -------------------------------------------------------------------------------------------------


def test_a_refused_pin_falls_back_with_one_warning(ledger: Ledger) -> None:
    ledger.refuse_pinning = True
    kept = HostMemory()
    with pytest.warns(UserWarning, match="page-locking 192 bytes") as record:
        buffers, pinned = allocate_ring(kept, 3, 64, "auto")
    assert len(record) == 1
    assert not pinned
    assert [buffer.numel() for buffer in buffers] == [64, 64, 64]
    assert kept.bytes_by_name == {"ring": 192}
    assert ledger.total == 192


def test_a_refused_pin_raises_where_it_was_asked_for(ledger: Ledger) -> None:
    ledger.refuse_pinning = True
    kept = HostMemory()
    with pytest.raises(RuntimeError, match=r"pin_memory=True: page-locking 192 bytes was refused .*out of memory"):
        allocate_ring(kept, 3, 64, True)
    assert kept.bytes_by_name == {}
    assert ledger.total == 0


@pytest.mark.parametrize("pin", [True, "auto"])
def test_a_granted_pin_warns_of_nothing(pin: bool | str, ledger: Ledger) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffers, pinned = allocate_ring(HostMemory(), 2, 64, pin)
    assert pinned
    assert len({buffer.data_ptr() for buffer in buffers}) == 2


def test_a_cpu_pins_nothing(ledger: Ledger) -> None:
    ledger.refuse_pinning = True
    assert not Pipeline(InlineEngine(CPU), HostMemory(), SLOT_BYTES, "auto").pinned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_originals_of_what_is_trained_are_released(dtype: torch.dtype) -> None:
    """4 bytes per parameter for the whole fit, if anything still held them."""
    array = np.ones((16, 16), dtype=np.float32)
    original = weakref.ref(array)
    module = nn.Linear(16, 16, bias=False)
    module.weight.data = torch.from_numpy(array)
    del array
    optimizer = torch.optim.AdamW(module.parameters())
    assert original() is not None  # the check can fail: the parameter holds it
    attachment = Attachment(module, [optimizer], torch.device("cpu"), lambda *_: dtype, Settings())
    assert original() is None
    attachment.detach()
    assert torch.equal(module.weight, torch.ones(16, 16))
