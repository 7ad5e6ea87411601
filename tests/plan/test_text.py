from __future__ import annotations

from textwrap import dedent

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PlanError
from isthmus.plan import text as text_module
from isthmus.plan.text import parse, render
from isthmus.plan.types import Plan
from tests.plan.golden_files import NAMES, golden, text_path
from tests.plan.strategies import any_plans


@settings(max_examples=80, deadline=None)
@given(any_plans())
def test_text_reads_back_to_the_same_plan(plan: Plan) -> None:
    text = render(plan)
    assert parse(text) == plan
    assert render(parse(text)) == text


@settings(max_examples=15, deadline=None)
@given(any_plans())
def test_equal_plans_have_equal_texts(plan: Plan) -> None:
    twin = msgspec.convert(msgspec.to_builtins(plan, order="sorted"), Plan)  # other order of `place`
    assert twin == plan
    assert render(twin) == render(plan)


def test_every_field_of_a_plan_is_in_its_text() -> None:
    """Changing any one value of the JSON form changes the text, or makes the same plan."""
    for name in ("server-and-duplicate", "pool", "pruned", "tensor-group", "interleaved"):
        plan = golden(name)
        tree = msgspec.to_builtins(plan)
        for changed in _changed(tree):
            other = msgspec.convert(changed, Plan)
            assert render(other) != render(plan)


def _changed(tree: object) -> list[object]:
    """The tree with one number, string of free content, or flag changed at a time."""
    if isinstance(tree, dict):
        return [
            {**tree, key: new}
            for key, value in tree.items()
            if key not in ("part", "name", "how", "state", "spill", "schedule", "policy", "precision")
            for new in _changed(value)
        ]
    if isinstance(tree, list | tuple):
        return [[*tree[:i], new, *tree[i + 1 :]] for i, value in enumerate(tree) for new in _changed(value)]
    if isinstance(tree, bool):
        return [not tree]
    if isinstance(tree, int | float):
        return [tree + 1]
    return [f"{tree}x"] if isinstance(tree, str) else []


def test_comments_empty_lines_and_line_ends_do_not_matter() -> None:
    text = text_path("tied").read_text()
    noisy = "# written by hand\n\n" + text.replace("\n", "  \r\n") + "\n    # done\n"
    assert parse(noisy) == golden("tied")


def test_the_example_in_the_docs_is_canonical() -> None:
    example = dedent((text_module.__doc__ or "").split("\n\n")[1]) + "\n"
    assert render(parse(example)) == example


PLAN = """plan for here
pipeline a: zoo:a, batch 8, precision fp32
  schedule 1f1b, micro-batches 2
  stage x .. y
    h/k/0: share 4
  sync b ring: [x] over h/k/0 h/k/1
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        (PLAN, "", None, "plan for CLUSTER"),
        ("plan for here", "pipeline a: m", 1, "`plan`"),
        ("plan for here", "plan for", 1, "a name"),
        ("plan for here", "plan for here\n  x", 2, "less indent"),
        ("batch 8, ", "", 2, "batch"),
        ("batch 8", "batch eight", 2, "digits"),
        ("batch 8", "batch 8, batch 9", 2, "each key once"),
        ("precision fp32", "precision fp64", 2, "bf16"),
        ("precision fp32", "precision fp32, size 3", 2, "sequence"),
        ("schedule 1f1b", "scedule 1f1b", 3, "Did you mean schedule"),
        (", micro-batches 2", "", 3, "micro-batches"),
        ("  schedule 1f1b, micro-batches 2\n", "", 2, "one line like"),
        ("stage x .. y", "stage x y", 4, "`..`"),
        ("stage x .. y", "stage x .. y, sharded-all, sharded-optimizer", 4, "sharded-optimizer or sharded-all"),
        ("stage x .. y", "stage x .. y, kept half", 4, "a number"),
        ("stage x .. y", "stage x .. y recompute", 4, "a comma"),
        ("    h/k/0", "   h/k/0", 5, "two spaces"),
        ("    h/k/0", "        h/k/0", 5, "two spaces"),
        ("    h/k/0", "\th/k/0", 5, "words"),
        ("share 4", "slices 4", 5, "share"),
        ("share 4", "share 4\n      deeper", 6, "less indent"),
        ("h/k/0: share", "h/k/0 h/k/1: share", 5, "`+`"),
        ("sync b ring", "sync b star", 6, "tree"),
        ("[x] over", '[x] "y over', 6, "words"),
        ("[x] over", '[x] "\\q" over', 6, "a JSON string"),
        ("[x] over", "[x]", 6, "`over`"),
        ("sync b ring", "  sync b ring", 6, "`:`"),
    ],
)
def test_errors_have_the_line_and_say_what_was_expected(old: str, new: str, line: int | None, expected: str) -> None:
    assert old in PLAN
    with pytest.raises(PlanError) as caught:
        parse(PLAN.replace(old, new, 1), where="my.plan")
    assert caught.value.rule == "text"
    assert caught.value.where == ("my.plan" if line is None else f"my.plan line {line}")
    assert expected in str(caught.value)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_damaged_text_gives_a_plan_or_an_error_with_a_line(data: st.DataObject) -> None:
    text = text_path(data.draw(st.sampled_from(NAMES))).read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        junk = data.draw(st.text(max_size=3) | st.sampled_from(("\n", ", ", ": ", '"', " over ", "  ", "-", "1e999")))
        text = text[:at] + junk + text[at + length :]
    try:
        plan = parse(text)
    except PlanError as error:
        assert error.rule == "text" and error.where is not None and error.expected
    else:
        assert parse(render(plan)) == plan
