"""The adapted layers of this project compute what peft's compute, forward and backward."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from swarm.policy.lora import LoraLinear, use_fewer_passes


class Two(nn.Module):
    """Two layers that read the same inputs, so that gradients add up."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20, bias=bias)
        self.second = nn.Linear(12, 20, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sin() * self.second(x)


def adapted(*, bias: bool = True, dropout: float = 0.0, scaling: int = 3) -> Any:
    """With factors that do something, and a scaling that is no power of two."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=4 * scaling, lora_dropout=dropout, target_modules=["first", "second"])
    model = peft.get_peft_model(Two(bias=bias), config)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one)
    return model.eval()


def layers(model: Any) -> list[Any]:
    return [model.base_model.model.first, model.base_model.model.second]


def result(model: Any, x: Tensor) -> list[Tensor]:
    """Outputs, and gradients of inputs and factors."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    outputs = model(x)
    outputs.pow(2).sum().backward()
    assert x.grad is not None
    return [outputs.detach(), x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shaped",
    [lambda x: x, lambda x: x[0], lambda x: x[0, 0], lambda x: x.transpose(0, 1), lambda x: x[:, ::2]],
    ids=["batch", "rows", "one row", "transposed", "every other row"],
)
def test_outputs_and_gradients_are_those_of_peft(bias: bool, shaped: Callable[[Tensor], Tensor]) -> None:
    model, x = adapted(bias=bias).double(), shaped(torch.randn(3, 6, 12, dtype=torch.float64))
    expected = result(model, x)
    for layer in layers(model):
        use_fewer_passes(layer)
        assert type(layer) is LoraLinear
    found = result(model, x)
    assert len(found) == len(expected) == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def peculiar(kind: str) -> tuple[Any, Tensor]:
    """A model whose layers have to be computed as peft does."""
    model, x = adapted(dropout=0.5 if kind == "dropout" else 0.0), torch.randn(3, 6, 12)
    if kind == "dropout":
        model.train()
    if kind == "merged":
        model.merge_adapter()
    if kind == "16 bits":
        for layer in layers(model):
            layer.base_layer.to(torch.bfloat16)
        x = x.bfloat16()
    if kind == "two adapters":
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["first", "second"]))
        model.base_model.set_adapter(["default", "second"])
    return model, x


@pytest.mark.parametrize("kind", ["disabled", "dropout", "merged", "16 bits", "two adapters"])
def test_whatever_peft_computes_in_another_way_is_left_to_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = peculiar(kind)
    for layer in layers(model):
        use_fewer_passes(layer)
    called: list[Any] = []
    plain = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: called.append(self) or plain(self, x))
    if kind == "disabled":
        with model.disable_adapter():
            model(x)
    else:
        model(x)
    assert called == layers(model)


class Own(nn.Linear):
    """As those of bitsandbytes, whose weights are stored in another way."""


@pytest.mark.parametrize("base", [Own(12, 20), nn.Embedding(12, 20)])
def test_layers_of_another_kind_stay_as_they_are(base: nn.Module) -> None:
    model = peft.get_peft_model(nn.Sequential(base), peft.LoraConfig(target_modules=["0"]))
    (layer,) = model.base_model.model
    before = type(layer)
    use_fewer_passes(layer)
    assert type(layer) is before and before is not LoraLinear
