"""Samples by number, their order, and losses: the same whoever asks, and clear words where something does not fit."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.errors import DataError
from isthmus.model import source
from isthmus.model.built import BuiltModel
from isthmus.model.function import _repeated
from isthmus.model.job import Job
from isthmus.model.load_job import named_code
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens, next_tokens, vectors
from isthmus.runtime.data.sample_order import SampleOrder, epoch_order
from isthmus.runtime.data.sources import open_samples
from isthmus.runtime.loss import open_loss

HERE = __name__  # functions of this file, as a user names his


def job(**fields: Any) -> Job:
    return msgspec.structs.replace(Job(name="j", model="zoo:mlp-tiny", batch=4), **fields)


def small(**fields: Any) -> BuiltModel:
    """A model of four features."""
    draw = partial(vectors, features=4, classes=3)
    given = {"name": "m", "module": nn.Linear(4, 3), "sequence": None, "draw": draw, "loss": cross_entropy}
    return BuiltModel(**(given | fields))


def reader(vocabulary: int = 300, **fields: Any) -> BuiltModel:
    """A model of sequences of eight tokens."""
    draw = partial(next_tokens, vocabulary=vocabulary, sequence=8)
    module = nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary))
    return small(**({"module": module, "sequence": 8, "draw": draw} | fields))


# -- order


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**70), count=st.integers(1, 300))
@settings(max_examples=60)
def test_an_epoch_has_every_sample_once(seed: int, epoch: int, count: int) -> None:
    order = epoch_order(seed, epoch, count)
    whole = order(np.arange(count, dtype=np.uint64)).tolist()
    assert sorted(whole) == list(range(count))
    assert [int(order(np.array([place], dtype=np.uint64))[0]) for place in range(min(count, 5))] == whole[:5]


@given(count=st.integers(1, 40), batch=st.integers(1, 90), steps=st.integers(1, 12), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_a_walk_uses_every_sample_once_per_epoch(count: int, batch: int, steps: int, seed: int) -> None:
    """Whatever the batch; any step can be had without those before it."""
    order = SampleOrder(seed=seed, count=count)
    walk = [number for step in range(steps) for number in order.numbers(step, batch)]
    assert len(walk) == steps * batch
    for start in range(0, len(walk) - count + 1, count):
        assert sorted(walk[start : start + count]) == list(range(count))
    assert max(Counter(walk).values()) - min(Counter(walk).get(n, 0) for n in range(count)) <= 1
    assert SampleOrder(seed=seed, count=count).numbers(steps - 1, batch) == walk[-batch:]


def test_orders_differ_by_epoch_and_seed_and_are_even() -> None:
    """Each sample comes as often in each place, over many epochs."""
    places = np.arange(1000, dtype=np.uint64)
    found = [epoch_order(seed, epoch, 1000)(places) for seed in (0, 1) for epoch in (0, 1)]
    assert all((a == b).sum() < 10 for i, a in enumerate(found) for b in found[:i])
    assert abs(np.corrcoef(found[0].astype(float), places.astype(float))[0, 1]) < 0.1
    for count in (3, 10):
        few = np.arange(count, dtype=np.uint64)
        cells = np.zeros((count, count))
        for epoch in range(1500):
            cells[few.astype(int), epoch_order(7, epoch, count)(few).astype(int)] += 1
        expected = 1500 / count
        freedom = (count - 1) ** 2
        assert abs(((cells - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5 + 1


def test_endless_samples_are_taken_in_order_and_large_numbers_fit() -> None:
    assert SampleOrder(seed=0, count=None).numbers(3, 4) == [12, 13, 14, 15]
    far = SampleOrder(seed=0, count=10**12).numbers(10**12, 10**3)
    assert len(set(far)) == 1000 and all(0 <= number < 10**12 for number in far)


# -- synthetic


@pytest.mark.parametrize("name", ["zoo:mlp-tiny", "zoo:gpt-tiny"])
def test_any_worker_draws_the_same_sample(name: str) -> None:
    samples = open_samples(job(model=name, seed=3), source.build(name))
    whole, targets = samples.get(range(10, 16))
    part, some = samples.get([15, 12])
    assert samples.count is None and targets is not None and some is not None
    assert torch.equal(part.args[0], whole.args[0][[5, 2]]) and torch.equal(some, targets[[5, 2]])
    assert len({tuple(row.flatten()[:8].tolist()) for row in whole.args[0]}) == 6
    other, _ = open_samples(job(model=name, seed=4), source.build(name)).get(range(10, 16))
    assert not torch.equal(other.args[0], whole.args[0])


def test_a_model_of_ones_own_repeats_its_example() -> None:
    example = Example(kwargs={"x": torch.arange(12.0).view(3, 4)})
    built = small(draw=partial(_repeated, example=example))
    with pytest.raises(DataError, match="no synthetic targets for this model, and the default loss needs some"):
        open_samples(job(), built)
    drawn, target = open_samples(job(loss="a.b:c"), built).get(range(20))
    assert target is None and {row[0].item() for row in drawn.kwargs["x"]} == {0.0, 4.0, 8.0}
    bare = small(draw=partial(_repeated, example=Example(args=(torch.zeros(2, 4, device="meta"),))))
    with pytest.raises(DataError, match="built without data"):
        open_samples(job(loss="a.b:c"), bare)


# -- text


@given(text=st.binary(min_size=9, max_size=60))
@settings(max_examples=25)
def test_text_is_cut_into_sequences(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_bytes(text)
    samples = open_samples(job(data=f"text:{path}"), reader())
    assert samples.count == (len(text) - 1) // 8
    drawn, targets = samples.get(range(samples.count))
    assert targets is not None
    for i in range(samples.count):
        assert bytes(drawn.args[0][i].tolist()) == text[8 * i : 8 * i + 8]
        assert bytes(targets[i].tolist()) == text[8 * i + 1 : 8 * i + 9]
    with pytest.raises(DataError, match=f"numbers below {samples.count}"):
        samples.get([samples.count])


def test_text_goes_in_as_the_model_takes_it(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"0123456789" * 10)
    named = reader(draw=partial(_repeated, example=Example(kwargs={"input_ids": torch.zeros(2, 16, dtype=torch.long)})))
    drawn, targets = open_samples(job(data=f"text:{tmp_path / 't'}"), named).get([2])
    assert bytes(drawn.kwargs["input_ids"][0].tolist()) == b"2345678901234567" and targets is not None


@pytest.mark.parametrize("form", ["u2.npy", "i4.npy", "u4.npy", "bin"])
def test_tokens_are_cut_into_sequences(form: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 50)
    path = tmp_path / f"tokens.{form.rpartition('.')[2]}"
    if form == "bin":
        path.write_bytes(ids.astype("<u2").tobytes())
    else:
        np.save(path, ids.astype(form[:2]))
    samples = open_samples(job(data=f"tokens:{path}"), reader())
    assert samples.count == 49 // 8
    drawn, targets = samples.get([5, 0])
    for row, number in enumerate((5, 0)):
        assert drawn.args[0][row].tolist() == ids[8 * number : 8 * number + 8].tolist()
        assert targets is not None and targets[row].tolist() == ids[8 * number + 1 : 8 * number + 9].tolist()


def test_tokens_that_cannot_be_used(tmp_path: Path) -> None:
    np.save(tmp_path / "real.npy", np.ones(50))
    np.save(tmp_path / "objects.npy", np.array([{}] * 50, dtype=object), allow_pickle=True)
    np.save(tmp_path / "short.npy", np.ones(8, dtype=np.uint16))
    np.save(tmp_path / "longer.npy", np.ones(50, dtype=np.uint16))
    whole = (tmp_path / "longer.npy").read_bytes()
    (tmp_path / "longer.npy").write_bytes(whole + b"\0\0")
    (tmp_path / "header.npy").write_bytes(whole.replace(b"(50,), }", b"(50     "))
    (tmp_path / "endless.npy").write_bytes(whole.replace(b"(50,), }" + b" " * 20, b"(9999999999999999999999,), }"))
    (tmp_path / "nothing.npy").touch()
    with (tmp_path / "archive.npy").open("wb") as file:
        np.savez(file, ids=np.ones(50, dtype=np.uint16))
    (tmp_path / "odd.bin").write_bytes(b"\1\0" * 50 + b"\1")
    for name, said in (
        ("real.npy", "no file of tokens. Found an array float64"),
        ("objects.npy", "the tokens cannot be read"),
        ("short.npy", "too short for one sample. Found 8 tokens"),
        ("none.bin", "cannot be read"),
        ("nothing.npy", "the tokens cannot be read"),
        ("archive.npy", "the tokens cannot be read"),
        ("header.npy", "the tokens cannot be read"),
        ("endless.npy", "the tokens cannot be read"),
        ("longer.npy", "larger than its array"),
        ("odd.bin", "does not hold whole tokens. Found 101 bytes"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            open_samples(job(data=f"tokens:{tmp_path / name}"), reader())
    np.save(tmp_path / "large.npy", np.full(50, 70_000, dtype=np.uint32))
    np.save(tmp_path / "below.npy", np.full(50, -100, dtype=np.int16))
    for name, said in (("large", "token 70000, read as uint32"), ("below", "token -100, read as int16")):
        samples = open_samples(job(data=f"tokens:{tmp_path / f'{name}.npy'}"), reader())
        with pytest.raises(DataError, match=said):
            samples.get([0])


@pytest.mark.parametrize("name", ["ids.NPY", "ids.bin"])
def test_an_array_is_known_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    """Its header would otherwise be the first tokens."""
    with (tmp_path / name).open("wb") as file:
        np.save(file, np.arange(50, dtype=np.uint16))
    drawn, _ = open_samples(job(data=f"tokens:{tmp_path / name}"), reader()).get([0])
    assert drawn.args[0].tolist() == [list(range(8))]


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345678")
    os.mkfifo(tmp_path / "pipe")
    masked = reader(draw=partial(masked_tokens, vocabulary=300, sequence=8, mask=299))
    long = tmp_path / "long"
    long.write_bytes(b"x" * 100)
    for path, built, text in (
        (tmp_path / "none", reader(), "cannot be read. Found No such file"),
        (tmp_path, reader(), "this is not a file. Found a folder"),
        (tmp_path / "pipe", reader(), "Found a device or a pipe"),
        (tmp_path / "short", reader(), "Found 8 bytes. Expected at least 9"),
        (long, reader(vocabulary=255), "Found a vocabulary of 255"),
        (long, small(), r"Found inputs float32\[1, 4\]"),
        (long, masked, "does not predict the next token"),
    ):
        with pytest.raises(DataError, match=text):
            open_samples(job(data=f"text:{path}"), built)
    samples = open_samples(job(data=f"text:{long}"), reader())
    long.write_bytes(b"y" * 200)
    with pytest.raises(DataError, match="changed while it was used"):
        samples.get([0])
    long.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        samples.get([0])


# -- the user's own


class Pairs:
    """Ten samples of four features; `form` says how they are given."""

    def __init__(self, form: str = "tensor") -> None:
        self.form = form

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        x = torch.arange(4.0) + number
        if self.form == "random":
            x = torch.rand(4)
        if self.form == "uneven":
            x = torch.zeros(3 + number)
        if self.form == "fails" and number == 7:
            raise KeyError("seven")
        if self.form == "leaves":
            raise SystemExit(0)
        if self.form == "alone":
            return x
        inputs = {
            "tuple": (x,), "dict": {"input": x}, "array": x.double().numpy(), "nan": torch.full((4,), torch.nan),
            "two": (x, x), "name": {"y": x}, "wide": torch.zeros(5), "whole": x.long(), "text": "x",
        }.get(self.form, x)  # fmt: skip
        return inputs, None if self.form == "no target" else {"a": 1} if self.form == "odd target" else number % 3


class Batches:
    """Samples that are had many at a time."""

    count = 10

    def __init__(self, targets: int = 1) -> None:
        self.targets = targets

    def get(self, numbers: list[int]) -> tuple[Example, Tensor]:
        x = torch.stack([torch.arange(4.0) + number for number in numbers])
        return Example(args=(x,)), torch.tensor(numbers).repeat(self.targets) % 3


class Unlike:
    """A dataset whose length is an error, or a number that no length can be."""

    def __init__(self, len: Any) -> None:
        self.len = len

    def __len__(self) -> int:
        if isinstance(self.len, BaseException):
            raise self.len
        return int(self.len)


class Uncounted:
    """Batches whose count is an error, or a number that no count can be."""

    def __init__(self, given: Any) -> None:
        self.given = given

    @property
    def count(self) -> Any:
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given

    def get(self, numbers: list[int]) -> None:
        raise AssertionError(numbers)


class Given:
    """Functions of a user, by name; `given` is what the one called `data` gives."""

    given: Any = None
    seen: tuple[int, int | None] = (0, None)


def data(seed: int, sequence: int | None = None) -> Any:
    Given.seen = (seed, sequence)
    return Given.given


def left() -> Any:
    raise SystemExit(0)


def leaving(output: Any, target: Any) -> Any:
    raise SystemExit(0)


def broken() -> Any:
    raise RuntimeError("no disk")


def own(given: Any, built: BuiltModel | None = None) -> Any:
    Given.given = given
    return open_samples(job(data=f"{HERE}:data", seed=9), built or small())


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "array", "list"])
def test_datasets_in_every_form(form: str) -> None:
    samples = own([Pairs()[i] for i in range(10)] if form == "list" else Pairs(form))
    drawn, targets = samples.get([7, 2])
    assert samples.count == 10 and targets.tolist() == [1, 2] and Given.seen == (9, None)
    assert drawn.args[0].dtype == torch.float32 and drawn.args[0].tolist() == [[7, 8, 9, 10], [2, 3, 4, 5]]


def test_samples_by_the_batch_and_by_name() -> None:
    drawn, targets = own(Batches()).get(range(3, 5))
    assert drawn.args[0][:, 0].tolist() == [3, 4] and targets.tolist() == [0, 1]
    named = small(draw=partial(_repeated, example=Example(kwargs={"input": torch.zeros(2, 4)})))
    assert own(Pairs("dict"), named).get([1])[0].kwargs["input"].shape == (1, 4)
    assert own(Pairs("tensor"), named).get([1])[0].kwargs["input"].shape == (1, 4)
    assert own(Pairs("no target")).get([1])[1] is None
    assert own(Pairs("nan")).get([1])[0].args[0].isnan().all()


class Normed:
    """Samples less the mean of those that are taken together, or made as long as the longest of them."""

    count = 10

    def __init__(self, how: str) -> None:
        self.how = how

    def get(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        x = torch.stack([torch.arange(4.0) + number for number in numbers])
        x = x - x.mean(0) if self.how == "normed" else F.pad(x, (0, len(numbers)))
        return x, torch.tensor(numbers) % 3


@pytest.mark.parametrize("how", ["normed", "padded"])
@pytest.mark.parametrize("numbers", [[6, 7], [9]])
def test_samples_that_depend_on_those_beside_them_are_refused(how: str, numbers: list[int]) -> None:
    with pytest.raises(DataError, match="a sample is another one when others are taken with it"):
        own(Normed(how)).get(numbers)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Pairs("random"), "a sample differs when it is taken again. Found two different samples 6"),
        (Pairs("uneven"), r"the samples cannot be stacked. Found float32\[9\], int64\[\] and float32\[10\]"),
        (Pairs("fails"), "a sample cannot be read. Found KeyError: 'seven'"),
        (Pairs("alone"), r"a sample is not a pair. Found float32\[4\]"),
        (Pairs("two"), "other inputs than the model. Found 2 inputs. Expected input"),
        (Pairs("name"), "other inputs than the model. Found y. Expected input"),
        (Pairs("wide"), r"do not fit the model. Found input as float32\[2, 5\]. Expected float32\[1, 4\]"),
        (Pairs("whole"), r"do not fit the model. Found input as int64\[2, 4\]"),
        (Pairs("text"), "the samples cannot be stacked. Found a str"),
        (Pairs("odd target"), "targets are not one for each sample. Found a dict"),
        (Batches(targets=2), r"targets are not one for each sample. Found int64\[2\]"),
        ([], "no numbered samples. Found a list with count 0"),
        (iter([1]), "Found a list_iterator with count none. Expected a dataset with len"),
        (None, "Found a NoneType"),
        (Unlike(len=RuntimeError("disk gone")), "Found a Unlike with count RuntimeError: disk gone"),
        (Unlike(len=-3), "Found a Unlike with count ValueError: __len__"),
        (Unlike(len=2**70), "Found a Unlike with count OverflowError"),
        (Unlike(len=SystemExit(4)), "Found a Unlike with count SystemExit: 4"),
        (Uncounted(2**70), "Found a Uncounted with count above 4611686018427387904"),
        (Uncounted(RuntimeError("disk gone")), "Found a Uncounted with count RuntimeError: disk gone"),
        (Uncounted(AttributeError("no file")), "Found a Uncounted with count AttributeError: no file"),
        (Pairs("leaves"), "a sample cannot be read. Found SystemExit: 0"),
    ],
)
def test_samples_that_do_not_fit(given: Any, text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        own(given).get([6, 7])
    assert caught.value.where == f"{HERE}:data"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere.at.all:data", "cannot be imported. Found ModuleNotFoundError"),
        (f"{HERE}:none", "has no function 'none'"),
        (f"{HERE}:broken", "The function failed. Found RuntimeError: no disk. Expected a function that can be called"),
        (f"{HERE}:left", "The function failed. Found SystemExit: 0. Expected a function that can be called"),
    ],
)
def test_functions_that_cannot_be_had(name: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        open_samples(job(data=name), small())
    if "failed" not in text:
        with pytest.raises(DataError, match=text):
            open_loss(job(loss=name), small())


def test_all_code_that_a_job_names_is_listed() -> None:
    assert named_code(job()) == ()
    assert named_code(job(model="hf:x", data="text:data")) == () == named_code(job(model="m.json", data="text:a.b:c"))
    assert named_code(job(model="a.b:c", data="d:e", loss="a.b:c")) == ("a.b:c", "d:e")


# -- losses


def squares(output: Tensor, target: Tensor | None) -> Any:
    return output.square().sum(), len(output)


def mean(output: Tensor, target: Tensor) -> Any:
    return F.cross_entropy(output, target), torch.tensor(len(target))


def contrast(output: Tensor, target: Tensor) -> Any:
    return (output @ output.T).sum(), torch.tensor(len(target))


def bad(output: Any, target: Any) -> Any:
    return {
        "one": output.sum(), "vector": (output.sum(0), 1), "number": (1.0, 1), "count": (output.sum(), [1]),
        "apart": (output.detach().sum(), len(output)), "integer": (output.sum().long(), 1),
        "twice": (output.sum(), 7), "negative": (output.sum(), -4), "none": (output.sum(), 0),
        "nan": (output.sum(), float("nan")), "endless": (output.sum(), torch.tensor(torch.inf)),
        "complex": (output.sum(), torch.tensor(2j)), "gigantic": (output.sum(), 10**400),
        "no sum": (output.sum() * torch.nan, 4),
    }[Given.given]  # fmt: skip


def test_the_default_loss_and_ones_own() -> None:
    output, target = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    total, count = open_loss(job(), small())(output, target)
    torch.testing.assert_close(total, F.cross_entropy(output, target, reduction="sum"))
    assert count == 5
    loss = open_loss(job(loss=f"{HERE}:squares"), small())
    for _ in range(2):
        total, count = loss(output, None)
        torch.testing.assert_close(total, output.square().sum())
        assert isinstance(count, Tensor) and count == 5 and total.requires_grad


def test_parts_of_a_batch_add_up_in_low_precision_too() -> None:
    output, target = torch.randn(6, 8, 50).bfloat16().requires_grad_(), torch.randint(0, 50, (6, 8))
    target[0] = -100  # no target here: a sample without any loss
    loss = open_loss(job(), small())
    whole, parts = loss(output, target), [loss(output[i : i + 2], target[i : i + 2]) for i in (0, 2, 4)]
    assert whole[1] == sum(part[1] for part in parts) == 40
    torch.testing.assert_close(whole[0], torch.stack([part[0] for part in parts]).sum())


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("mean", None, r"the sum of a loss must add up over samples. Found .* for 4 samples"),
        ("contrast", None, "the sum of a loss must add up over samples"),
        ("bad", "one", r"the loss is not a pair. Found float32\[\]. Expected \(sum of the losses"),
        ("bad", "vector", r"the sum of a loss must be one number. Found float32\[3\]"),
        ("bad", "number", "must be one number. Found a float"),
        ("bad", "integer", "must be one number. Found int64"),
        ("bad", "count", "the count of a loss must be one number. Found a list"),
        ("bad", "apart", "the loss has no gradient"),
        (
            "bad",
            "twice",
            "the count of a loss must add up over samples. Found 7 for 4 samples, 7 for the first 1 and 7",
        ),
        ("bad", "negative", "the count of a loss must be 0 or more, and finite. Found -4"),
        ("bad", "none", "the count of a loss must be more than 0. Found 0 for 4 samples"),
        ("bad", "nan", "the count of a loss must be 0 or more, and finite. Found nan"),
        ("bad", "endless", "the count of a loss must be 0 or more, and finite. Found inf"),
        ("bad", "complex", r"the count of a loss must be a real number. Found complex64\[\]"),
        ("bad", "gigantic", "the count of a loss must be a real number. Found a number beyond 1e308"),
        ("bad", "no sum", "the sum of a loss must be a finite number. Found nan"),
        ("leaving", None, "the loss cannot be computed .* Found SystemExit: 0"),
    ],
)
def test_losses_that_are_none(name: str, given: Any, text: str) -> None:
    Given.given = given
    output = torch.arange(1.0, 13.0).view(4, 3).requires_grad_()
    with pytest.raises(DataError, match=text) as caught:
        open_loss(job(loss=f"{HERE}:{name}"), small())(output, torch.tensor([0, 1, 2, 0]))
    assert caught.value.where == f"{HERE}:{name}"


def test_model_loss_and_data_that_do_not_go_together() -> None:
    output = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(DataError, match="samples have no targets, and the loss needs some"):
        open_loss(job(), small())(output, None)
    with pytest.raises(DataError, match=r"output float32\[4, 3\]; targets int64\[5\]. Name a loss that fits"):
        open_loss(job(), small())(output, torch.zeros(5, dtype=torch.long))
    with pytest.raises(DataError, match=r"AttributeError.*output float32\[4, 3\], float32\[4, 3\]"):
        open_loss(job(), small())((output, output), torch.zeros(4, dtype=torch.long))
