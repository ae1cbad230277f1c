"""Memory that is released and restored at the same address."""

from __future__ import annotations

import torch

from headrace.engine.native.releasable_memory import DeviceMemory

SIZE = 256 << 20


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def make_memory() -> DeviceMemory:
    return DeviceMemory(SIZE, torch.device("cuda"))


def test_memory_given_back_is_free_and_comes_back_to_its_address() -> None:
    memory = make_memory()
    address, held = memory.tensor.data_ptr(), free()
    assert memory.tensor.numel() == SIZE and not memory.tensor.any()
    memory.release()
    memory.release()  # once is enough
    assert free() - held >= SIZE
    others = torch.full((SIZE // 2,), 7, dtype=torch.uint8, device="cuda")
    memory.restore()
    memory.restore()
    assert memory.tensor.data_ptr() == address
    memory.tensor.fill_(3)
    assert (memory.tensor == 3).all() and (others == 7).all()
    memory.release()


def test_a_graph_reads_what_the_address_holds_now() -> None:
    memory = make_memory()
    numbers, out = memory.tensor[: 4 << 10].view(torch.float32), torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out.copy_(numbers.sum())
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(numbers.sum())
    for value in (1.0, 2.0):
        memory.release()
        memory.restore()
        numbers.fill_(value)
        graph.replay()
        assert out.item() == value * (1 << 10)
    del graph
    memory.release()
