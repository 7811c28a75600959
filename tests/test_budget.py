"""What a run needs against what is free, with the system's files made up."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_cpu_offload.offload import budget
from lightning_cpu_offload.offload.budget import Bytes, available, free_host, needs, require_fits

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 16 GiB free and no cgroups."""
    write(tmp_path, "proc/meminfo", "MemTotal:       33554432 kB\nMemFree: 1024 kB\nMemAvailable:   16777216 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class TestFreeHost:
    def test_is_what_the_machine_has_available(self, root: Path) -> None:
        assert free_host(root) == 16 * GIB

    def test_is_unknown_without_the_files(self, tmp_path: Path) -> None:
        assert free_host(tmp_path) == math.inf

    def test_of_this_machine_is_within_its_memory(self) -> None:
        assert 0 < free_host() < 1 << 50

    @pytest.mark.parametrize("above", [False, True], ids=["own", "above"])
    def test_respects_a_limit_of_version_2(self, root: Path, above: bool) -> None:
        write(root, "proc/self/cgroup", "0::/user/job\n")
        group = "sys/fs/cgroup/user" if above else "sys/fs/cgroup/user/job"
        write(root, f"{group}/memory.max", f"{8 * GIB}\n")
        write(root, f"{group}/memory.current", f"{5 * GIB}\n")
        assert free_host(root) == 3 * GIB

    def test_counts_file_pages_of_a_group_as_free(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/\n")
        write(root, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
        write(root, "sys/fs/cgroup/memory.current", f"{7 * GIB}\n")
        write(root, "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
        assert free_host(root) == 3 * GIB

    def test_takes_max_for_no_limit(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/\n")
        write(root, "sys/fs/cgroup/memory.max", "max\n")
        write(root, "sys/fs/cgroup/memory.current", "7\n")
        assert free_host(root) == 16 * GIB

    def test_is_never_negative(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "0::/\n")
        write(root, "sys/fs/cgroup/memory.max", "5\n")
        write(root, "sys/fs/cgroup/memory.current", "7\n")
        assert free_host(root) == 0

    def test_respects_a_limit_of_version_1(self, root: Path) -> None:
        write(root, "proc/self/cgroup", "11:cpu,cpuacct:/a\n4:memory:/docker/x\n1:name=systemd:/a\n")
        write(root, "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", f"{4 * GIB}\n")
        write(root, "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes", f"{GIB}\n")
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n")
        assert free_host(root) == 3 * GIB

    def test_finds_the_limit_inside_a_container(self, root: Path) -> None:
        """There the path of the group is the host's, which the container does not see."""
        write(root, "proc/self/cgroup", "4:memory:/docker/x\n")
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
        write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
        assert free_host(root) == 3 * GIB


class TestNeeds:
    def test_of_adamw_are_twelve_bytes_on_the_host_and_four_on_the_device(self) -> None:
        needed = needs(weight_bytes=2000, numel=1000, state_bytes=8000, staging_bytes=64, pin=True)
        assert needed == Bytes(host=12_064, pinned=64, device=4000)

    def test_of_what_is_not_stepped_are_on_the_device(self) -> None:
        needed = needs(weight_bytes=2040, numel=1010, state_bytes=4040, rest_bytes=7)
        assert needed == Bytes(host=8080, pinned=0, device=4087)

    def test_of_gradients_on_the_host_are_four_more_there(self) -> None:
        needed = needs(weight_bytes=2000, numel=1000, state_bytes=8000, gradients_on_host=True)
        assert needed == Bytes(host=16_000, device=2000)

    def test_are_less_by_what_the_module_gives_back(self) -> None:
        assert needs(weight_bytes=2000, numel=1000, state_bytes=8000, held_bytes=4000).host == 8000

    def test_are_no_less_than_masters_beside_the_originals(self) -> None:
        assert needs(weight_bytes=2000, numel=1000, state_bytes=0, held_bytes=4000).host == 4000

    def test_of_a_cpu_are_all_on_the_host(self) -> None:
        needed = needs(weight_bytes=2000, numel=1000, state_bytes=8000, staging_bytes=64, pin=True, on_cpu=True)
        assert needed == Bytes(host=16_064)


class TestRequireFits:
    def test_lets_pass_what_fits_exactly(self) -> None:
        require_fits(Bytes(5, 5, 5), Bytes(5, 5, 5), pin_required=True)

    @pytest.mark.parametrize("kind", ["host", "device", "pinned"])
    def test_names_the_kind_the_numbers_and_what_would_help(self, kind: str) -> None:
        needed = Bytes(**{kind: 5.5 * GIB})
        with pytest.raises(
            MemoryError, match=rf"^{kind} memory: 5.50 GiB are needed, 4.25 GiB are free, 1.25"
        ) as error:
            require_fits(needed, Bytes(4.25 * GIB, 4.25 * GIB, 4.25 * GIB), pin_required=True)
        assert all(option in str(error.value) for option in budget.OPTIONS[kind])

    def test_pinning_is_a_wish_unless_it_was_asked_for(self) -> None:
        require_fits(Bytes(pinned=2), Bytes(1, 1, 1))

    def test_what_is_unknown_is_enough(self) -> None:
        require_fits(Bytes(1, 1, 1), Bytes(math.inf, math.inf, math.inf), pin_required=True)


def test_available_of_a_cpu_names_no_device_memory(root: Path) -> None:
    free = available(torch.device("cpu"), root)
    assert (free.host, free.device) == (16 * GIB, math.inf)
    assert free.pinned > 0


def test_the_locked_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    assert budget.free_pinned() == 65_536
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert budget.free_pinned() == math.inf


def test_device_memory_counts_what_torch_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (100, 1000), raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 50, raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 20, raising=False)
    assert budget.free_device(torch.device("cuda", 0)) == 130


def test_device_memory_is_unknown_where_a_backend_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse, raising=False)
    assert budget.free_device(torch.device("cuda", 0)) == math.inf
