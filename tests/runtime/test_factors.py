"""Gradients rebuilt from factors against the plain sum over all samples; taps against the operations they replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from isthmus.errors import ModelError
from isthmus.model.job import Job
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.plan import ring
from isthmus.runtime.comm.channel import ChannelError, Channels
from isthmus.runtime.comm.factor_exchange import FactorExchange, TurnLine
from isthmus.runtime.comm.factors import Factors, make_factors, tap
from isthmus.runtime.program import BucketSpec
from tests.runtime.threads import at_once, networks

aten = torch.ops.aten


def graph(build: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any], weight: Tensor, bias: Tensor) -> fx.GraphModule:
    made = fx.Graph()
    x, w, b = made.placeholder("x"), made.get_attr("layer.weight"), made.get_attr("layer.bias")
    made.output((build(made, x, w, b),))
    return fx.GraphModule({"layer.weight": nn.Parameter(weight), "layer.bias": nn.Parameter(bias)}, made)


# (weight is (outputs, inputs), how the product is written)
FORMS: dict[str, tuple[bool, Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any]]] = {
    "linear": (True, lambda g, x, w, b: g.call_function(aten.linear.default, (x, w, b))),
    "linear, no bias": (True, lambda g, x, w, b: g.call_function(aten.linear.default, (x, w))),
    "conv1d": (False, lambda g, x, w, b: g.call_function(aten.addmm.default, (b, x, w))),
    "conv1d, bias of rows": (False, lambda g, x, w, b: g.call_function(aten.addmm.default, (turned(g, b), x, w))),
    "mm": (False, lambda g, x, w, b: g.call_function(aten.mm.default, (x, w))),
    "matmul": (False, lambda g, x, w, b: g.call_function(aten.matmul.default, (x, w))),
    "turned mm": (True, lambda g, x, w, b: g.call_function(aten.mm.default, (x, turned(g, w)))),
    "turned addmm": (True, lambda g, x, w, b: g.call_function(aten.addmm.default, (b, x, turned(g, w, 0, 1)))),
    "turned linear": (False, lambda g, x, w, b: g.call_function(aten.linear.default, (x, turned(g, w, -1, 0), b))),
}


def turned(g: fx.Graph, node: fx.Node, *dims: int) -> fx.Node:
    if node.target == "layer.bias":
        return g.call_function(aten.unsqueeze.default, (node, 0))
    return g.call_function(aten.transpose.int, (node, *dims)) if dims else g.call_function(aten.t.default, (node,))


def made(form: str, inputs: int = 5, outputs: int = 3, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    outputs_first, build = FORMS[form]
    generator = torch.Generator().manual_seed(1)
    shape = (outputs, inputs) if outputs_first else (inputs, outputs)
    return graph(
        build,
        torch.randn(shape, generator=generator, dtype=dtype),
        torch.randn(outputs, generator=generator, dtype=dtype),
    )


def shapes(form: str) -> tuple[int, ...]:
    return (2, 2, 5) if "linear" in form or form == "matmul" else (4, 5)


@pytest.mark.parametrize("form", FORMS)
def test_a_tap_gives_what_the_product_gives(form: str) -> None:
    plain, tapped = made(form), made(form)
    taken: list[tuple[Tensor, Tensor]] = []
    weight = tapped.get_parameter("layer.weight")
    tap([tapped], "layer.weight", weight, lambda left, right: taken.append((left, right)))
    results = []
    for module in (plain, tapped):
        x = torch.randn(shapes(form), generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
        (y,) = module(x)
        y.square().sum().backward()
        results.append((y, x.grad, module.get_parameter("layer.bias").grad))
    for expected, found in zip(*results, strict=True):
        assert (expected is None and found is None) or torch.equal(expected, found)
    assert weight.grad is None and len(taken) == 1
    left, right = taken[0]
    torch.testing.assert_close(left.t() @ right, plain.get_parameter("layer.weight").grad)


def test_names_stay_and_inputs_need_no_gradient() -> None:
    tapped = made("linear")
    names = [name for name, _ in tapped.named_parameters()]
    taken: list[Tensor] = []
    tap([tapped], "layer.weight", tapped.get_parameter("layer.weight"), lambda left, right: taken.append(left))
    tapped(torch.randn(4, 5, dtype=torch.float64))[0].sum().backward()
    assert names == [name for name, _ in tapped.named_parameters()] and len(taken) == 1


def test_computing_again_sends_nothing() -> None:
    tapped = made("linear")
    taken: list[Tensor] = []
    tap([tapped], "layer.weight", tapped.get_parameter("layer.weight"), lambda left, right: taken.append(right))
    x = torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    checkpoint(lambda x: tapped(x)[0].sin(), x, use_reentrant=False).sum().backward()
    assert len(taken) == 1 and torch.equal(taken[0], x.detach())


def test_modules_are_tapped_too() -> None:
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    taken: list[Tensor] = []
    tap([plain], "2.weight", plain[2].weight, lambda left, right: taken.append(left.t() @ right))
    plain(torch.randn(3, 5).double()).square().sum().backward()
    assert plain[2].weight.grad is None and plain[2].bias.grad is not None and plain[0].weight.grad is not None
    assert taken[0].shape == (2, 4)


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x, w, b: g.call_function(aten.linear.default, (g.call_function(aten.linear.default, (x, w)), w)),
        lambda g, x, w, b: g.call_function(aten.mul.Tensor, (x, w)),
        lambda g, x, w, b: g.call_function(aten.mm.default, (w, x)),
        lambda g, x, w, b: g.call_function(aten.addmm.default, (b, x, w), {"beta": 2}),
        lambda g, x, w, b: x,
    ],
)
def test_what_is_no_single_product_is_refused(build: Any) -> None:
    module = graph(build, torch.ones(3, 3), torch.ones(3))
    with pytest.raises(ModelError, match=r"layer.weight cannot be synced by factors.*Use ring for it"):
        tap([module], "layer.weight", module.get_parameter("layer.weight"), lambda left, right: None)


# -- exchanges


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Channels]]:
    made = networks([f"w{i}" for i in range(4)])
    yield made
    for network in made.values():
        network.close()


numbers = iter(range(10**6))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(["linear", "linear, no bias", "conv1d", "mm"]),
    shares=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    micro_batches=st.integers(1, 3),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_gradients_are_those_of_all_samples(
    workers: dict[str, Channels], form: str, shares: list[list[int]], micro_batches: int, dtype: torch.dtype
) -> None:
    """Every participant has slices of its own sizes; two steps, so that receives are posted ahead across them."""
    names, name = list(workers)[: len(shares)], f"exchange {next(numbers)}"
    steps, data = 2, torch.Generator().manual_seed(3)
    inputs = {
        (step, m, p, k): torch.randn(rows, 5, generator=data, dtype=torch.float64).to(dtype)
        for step in range(steps)
        for m in range(micro_batches)
        for p, share in enumerate(shares)
        for k, rows in enumerate(share)
    }
    plain = made(form, dtype=torch.float64)
    expected = []
    for step in range(steps):
        plain.zero_grad()
        for (at, *_), x in inputs.items():
            if at == step:
                plain(x.double())[0].square().sum().backward()
        expected.append(plain.get_parameter("layer.weight").grad.clone())

    def work(p: int) -> list[Tensor]:
        module = made(form, dtype=torch.float64).to(dtype)
        weight = module.get_parameter("layer.weight")
        channels = [None if other == names[p] else workers[names[p]].channel(name, other) for other in names]
        exchange = FactorExchange("layer.weight", weight, channels, len(shares[p]))
        tap([module], "layer.weight", weight, exchange.take)
        found = []
        for step in range(steps):
            weight.grad = torch.zeros_like(weight)
            for m in range(micro_batches):
                for k in range(len(shares[p])):
                    module(inputs[step, m, p, k])[0].square().sum().backward()
            Factors([exchange]).all_reduce(weight.grad)
            found.append(weight.grad)
        exchange.close()
        return found

    results = at_once([lambda p=p: work(p) for p in range(len(shares))])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for result in results:
        for step in range(steps):
            assert torch.equal(result[step], results[0][step])
            scale = float(expected[step].abs().max()) + 1.0
            assert float((result[step].double() - expected[step]).abs().max()) <= tolerance * scale


def test_weights_take_turns(workers: dict[str, Channels], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are expected at once and not more, where there is no other room; each worker has an order of its own."""
    monkeypatch.setattr(ring, "SCRATCH", 0)
    monkeypatch.setattr(ring, "FAST", 0.0)
    names, count, name = list(workers)[:2], 6, f"turns {next(numbers)}"
    factors = [torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(k)) for k in range(count)]
    expected = [sum(f.reshape(-1, 4).t() @ f.reshape(-1, 4) for f in found.unbind()) for found in factors]

    def work(p: int) -> list[Tensor]:
        line = TurnLine()
        made = [
            FactorExchange(
                str(k),
                nn.Parameter(torch.zeros(4, 4)),
                [None if other == names[p] else workers[names[p]].channel(f"{name} {k}", other) for other in names],
                1,
                line,
            )
            for k in range(count)
        ]
        for m in range(2):
            for k in range(count) if p == 0 else reversed(range(count)):
                made[k].take(factors[k][m, p], factors[k][m, p])
        for exchange in made:
            exchange.wait()
        assert len(line._expected) <= 2
        line.close()
        return [exchange.weight.grad for exchange in made]

    first, second = at_once([lambda p=p: work(p) for p in range(2)])
    for k in range(count):
        assert torch.equal(first[k], second[k])
        torch.testing.assert_close(first[k], expected[k])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_captured_model(workers: dict[str, Channels]) -> None:
    """Weights of a cut model, tapped by name, against one process that has all samples."""
    names = list(workers)[:2]
    torch.manual_seed(0)
    whole = Small()
    state, samples = whole.state_dict(), torch.randn(7, 6)
    whole(samples).square().sum().backward()
    spec = BucketSpec(
        name="b", number=0, how="factors", parameters=("first.weight", "second.weight"), members=tuple(names)
    )
    job = Job(name="captured", model="zoo:mlp-tiny", batch=7)

    def copied() -> Pieces:
        model = Small()
        model.load_state_dict(state)
        return cut(model, Example(args=(torch.zeros(2, 6),), kwargs={}), name="small")

    both = [copied(), copied()]  # torch.export is not for several threads

    def work(p: int) -> dict[str, Tensor]:
        pieces = both[p]
        parameters = {n: q for block in pieces.blocks for n, q in block.named_parameters()}
        program: Any = SimpleNamespace(device=names[p], job=job, runs=[SimpleNamespace(slices=1)])
        sync = make_factors(spec, program, workers[names[p]], {0: pieces.blocks}, parameters, {})
        pieces.run(samples[:2] if p == 0 else samples[2:]).square().sum().backward()
        sync.all_reduce(torch.empty(0))
        sync.close()
        return {n: q.grad for n, q in parameters.items() if q.grad is not None}

    first, second = at_once([lambda p=p: work(p) for p in range(2)])
    for name in spec.parameters:
        torch.testing.assert_close(first[name], whole.get_parameter(name).grad)
        assert torch.equal(first[name], second[name])
    torch.testing.assert_close(first["first.bias"] + second["first.bias"], whole.first.bias.grad)


def test_other_sizes_later_are_refused() -> None:
    exchange = FactorExchange("w", nn.Parameter(torch.zeros(3, 5)), [None], 1)
    exchange.take(torch.ones(2, 3), torch.ones(2, 5))
    with pytest.raises(ModelError, match=r"Found 4 rows in slice 0. Expected 2 as in the first micro-batch"):
        exchange.take(torch.ones(4, 3), torch.ones(4, 5))
    exchange.wait()
    assert torch.equal(exchange.weight.grad, torch.full((3, 5), 2.0))
    exchange.close()


def test_a_lost_participant_is_told() -> None:
    a, b = networks(["a", "b"]).values()
    exchange = FactorExchange("w", nn.Parameter(torch.zeros(3, 5)), [None, a.channel("f", "b")], 1)
    b.channel("f", "a").connected()
    exchange.take(torch.ones(2, 3), torch.ones(2, 5))
    b.close()
    with pytest.raises(ChannelError, match="lost the channel to b"):
        exchange.wait()
    exchange.close()
    a.close()
