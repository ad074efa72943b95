"""The simulated card behaves as a GPU does: places are kept apart, memory is counted, and a mix-up is noticed."""

import gc

import numpy as np
import pytest
import torch
from simulated_card import SimulatedCard

CARD = "cuda:0"


@pytest.fixture
def card(monkeypatch):
    with SimulatedCard().inserted(monkeypatch) as card:
        yield card


def test_tensors_say_where_they_are(card) -> None:
    made = torch.zeros(3, device=CARD)
    moved, listed = torch.arange(3).to("cuda"), torch.tensor([1.0, 2.0], device=CARD)
    for tensor in (made, moved, listed, made + 1, moved.float(), made[1:], made.new_zeros(2), torch.zeros_like(made), made[None]):
        assert (tensor.device, tensor.is_cuda, tensor.is_cpu) == (torch.device(CARD), True, False)
    for tensor in (torch.zeros(3), made.cpu(), moved.to("cpu", torch.float16), made.new_zeros(2, device="cpu")):
        assert (tensor.device.type, tensor.is_cuda) == ("cpu", False)
    assert made.to(CARD) is made
    assert made.to(torch.float32) is made
    assert torch.ones(2).to(made).is_cuda


def test_a_move_is_a_copy(card) -> None:
    host = torch.zeros(3)
    there = host.to(CARD)
    there += 1
    back = there.cpu()
    back += 1
    assert (host.tolist(), there.tolist(), back.tolist()) == ([0] * 3, [1] * 3, [2] * 3)


MIXED = {
    "sum": lambda card, host: card + host,
    "in place": lambda card, host: card.add_(host),
    "product": lambda card, host: card @ host,
    "concatenation": lambda card, host: torch.cat([card, host]),
    "a choice": lambda card, host: torch.where(card > 0, card, host),
    "gather": lambda card, host: card.gather(0, host.long()),
    "host indexed by card": lambda card, host: host[card.long()],
    "inside a linear": lambda card, host: torch.nn.functional.linear(card, host),
    "solve": lambda card, host: torch.linalg.solve_triangular(host, card, upper=False),
    "comparison": lambda card, host: torch.equal(card, host),
    "a scalar of the card with the host's": lambda card, host: host + card.sum(),
}


@pytest.mark.parametrize("mix", MIXED)
def test_a_missing_move_is_noticed(mix: str, card) -> None:
    """One `.to` too few, in each way that code mixes tensors."""
    with pytest.raises(RuntimeError, match=r"on the same device|indices should be"):
        MIXED[mix](torch.ones(3, 3, device=CARD), torch.ones(3, 3))
    MIXED[mix](torch.zeros(3, 3, device=CARD), torch.zeros(3, 3).to(CARD))


def test_what_a_gpu_takes_of_the_host(card) -> None:
    x = torch.arange(6.0, device=CARD)
    assert (x * torch.tensor(2.0)).is_cuda
    assert x[torch.tensor([1, 2])].tolist() == [1, 2]
    assert x[torch.arange(6) > 3].tolist() == [4, 5]
    x[:2] = torch.ones(2)
    x.copy_(torch.zeros(6))
    assert (x.is_cuda, float(x.sum()), x.tolist()) == (True, 0.0, [0.0] * 6)


@pytest.mark.parametrize("read", [lambda x: x.numpy(), np.asarray])
def test_the_host_cannot_read_it(read, card) -> None:
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        read(torch.ones(3, device=CARD))
    torch.ones(3, device=CARD).cpu().numpy()


def test_no_generator_of_the_host(card) -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randn(3, device=CARD, generator=torch.Generator())


def test_memory_is_counted_and_given_back(monkeypatch) -> None:
    card = SimulatedCard(limit_bytes=10 * 4096)
    with card.inserted(monkeypatch):
        x = torch.zeros(1024, device=CARD)
        view = x[10:]
        y = x + 1
        assert torch.cuda.memory_allocated() == 2 * 4096
        del x
        assert card.live == 2 * 4096, "a view keeps the memory"
        del view, y
        gc.collect()
        assert (card.live, torch.cuda.max_memory_allocated()) == (0, 2 * 4096)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.zeros(11 * 1024, device=CARD)
        assert torch.cuda.mem_get_info() == (10 * 4096, 10 * 4096)
        kept = torch.zeros(6 * 1024, device=CARD)
        with pytest.raises(torch.OutOfMemoryError):
            kept + 1
        assert card.live == 6 * 4096
        assert card.refused == 2


def test_gradients_stay_on_the_card(card) -> None:
    x = torch.ones(3, device=CARD, requires_grad=True)
    (into,) = torch.autograd.grad((x * x).sum(), [x])
    assert into.is_cuda
    with torch.inference_mode():
        assert (into + 1).is_cuda
