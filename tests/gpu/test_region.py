"""Memory that is given back and taken again at the same address."""

from __future__ import annotations

import torch

SIZE = 256 << 20


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def make_region():
    from headrace.engine.native.cuda.memory import Region

    return Region(SIZE, torch.device("cuda"))


def test_memory_given_back_is_free_and_comes_back_to_its_address() -> None:
    region = make_region()
    address, held = region.tensor.data_ptr(), free()
    assert region.tensor.numel() == SIZE and not region.tensor.any()
    region.give_back()
    region.give_back()  # once is enough
    assert free() - held >= SIZE
    others = torch.full((SIZE // 2,), 7, dtype=torch.uint8, device="cuda")
    region.take()
    region.take()
    assert region.tensor.data_ptr() == address
    region.tensor.fill_(3)
    assert (region.tensor == 3).all() and (others == 7).all()
    region.close()


def test_a_graph_reads_what_the_address_holds_now() -> None:
    region = make_region()
    numbers, out = region.tensor[: 4 << 10].view(torch.float32), torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out.copy_(numbers.sum())
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(numbers.sum())
    for value in (1.0, 2.0):
        region.give_back()
        region.take()
        numbers.fill_(value)
        graph.replay()
        assert out.item() == value * (1 << 10)
    del graph
    region.close()
