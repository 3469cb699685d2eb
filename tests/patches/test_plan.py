"""Problems found before anything is patched: rows, conflicts, version ranges, forks, order of wrappers."""

from __future__ import annotations

import itertools

import pytest

from mindspeed_dsa.patches import (
    Claim,
    MindSpeedDSAError,
    Patch,
    PatchDeclarationError,
    PatchError,
    PatchManager,
)
from tests.patches.house import assert_identical, load, patch, snapshot, states


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": "house.core.area"}, "package.module:name"),
        ({"target": "house.core:"}, "package.module:name"),
        ({"target": "house.core:Room..paint"}, "package.module:name"),
        ({"impl": "house_impl"}, "package.module:name"),
        ({"kind": "decorate"}, "use one of replace, wrap"),
        ({"why": ""}, "`why`"),
        ({"key": "a"}, "`key`"),
        ({"kind": "entry"}, "`key`"),
        ({"params": "x"}, "tuple"),
        ({"stale": "ignore"}, "error or report"),
    ],
)
def test_malformed_rows(fields, words):
    row = {"target": "house.core:area", "kind": "wrap", "impl": "house_impl:counted", "why": "test"}
    with pytest.raises(PatchDeclarationError, match=words):
        Patch(**{**row, **fields})


def test_all_problems_at_once_and_nothing_changed(house):
    load("house.core")
    before = snapshot()
    manager = house.manager(
        patch("core:area", "replace", "house_impl:tenfold"),
        patch("core:area", "replace", "house_impl:hundredfold"),
        patch("core:nothing"),
        patch("core:Room.nothing"),
        patch("core:volume", params=("x", "depth", "width")),
        patch("core:Room.paint", params=("self", "colour")),
        patch("core:attic", required=False),
    )
    with pytest.raises(PatchError) as caught:
        manager.check()
    assert_identical(before, snapshot())
    text = "\n".join(caught.value.problems)
    # The optional row is skipped and is no problem.
    assert len(caught.value.problems) == 4
    assert (
        "house.core:area is replaced by both f0 (house_impl:tenfold) and f1 (house_impl:hundredfold)" in text
    )
    assert "switch one of the two off" in text
    assert "f2: house.core:nothing does not exist" in text
    assert "f3: house.core:Room.nothing does not exist" in text
    assert "f4: house.core:volume has no parameter depth, width" in text
    assert states(manager)[-1] == "skipped"


def test_parameters_behind_var_keyword_are_not_missing(house):
    house.write({"house/odd.py": "def f(x, **kwargs): return kwargs\nmaximum = max"})
    load("house.odd")
    house.manager(patch("odd:f", params=("x", "mask")), patch("odd:maximum", params=("key",))).check()


@pytest.mark.parametrize("kinds", [("replace", "value"), ("wrap", "value"), ("value", "value")])
def test_kinds_that_cannot_share_a_target_are_conflicts(house, kinds):
    rows = [
        patch("core:area", kind, f"house_impl:{name}")
        for kind, name in zip(kinds, ("tenfold", "noop"), strict=True)
    ]
    manager = house.manager(*rows, features=("left", "right"))
    with pytest.raises(PatchError) as caught:
        manager.check()
    assert "left" in str(caught.value)
    assert "right" in str(caught.value)
    assert "switch one of the two off" in str(caught.value)


def test_two_features_may_agree_on_one_replacement(house):
    manager = house.armed(*(patch("core:area", "replace", "house_impl:tenfold") for _ in range(2)))
    assert load("house.core").area(2) == 20
    assert manager.report()[0].features == ["f0", "f1"]


@pytest.mark.parametrize(("contexts", "agreed"), [(("same", "same"), True), (("left", "right"), False)])
def test_two_features_agree_on_a_factory_only_with_one_context(house, contexts, agreed):
    source = (house.folder / "house_impl.py").read_text()
    house.write({"house_impl.py": source + "\ndef made(context): return lambda x, factor=2: context\n"})
    manager = PatchManager()
    house.managers.append(manager)
    row = Patch("house.core:area", "replace", "house_impl:made", "test", factory=True)
    manager.plan(Claim(f"f{i}", row, i, context) for i, context in enumerate(contexts))
    if not agreed:
        with pytest.raises(PatchError, match=r"replaced by both f0 .* and f1"):
            manager.check()
        return
    manager.check()
    manager.arm()
    assert load("house.core").area(2) == "same"


@pytest.mark.parametrize(
    ("impl", "contexts", "expected", "applied"),
    [
        ("mark_a", ("left", "right"), "a(swept)", 1),
        ("mark_with_context", ("same", "same"), "same(swept)", 1),
        ("mark_with_context", ("left", "right"), "right(left(swept))", 2),
        # Both contexts begin with the same letter, and the decorator depends on no more.
        ("mark_with_first", ("left", "lower"), "left(swept)", 1),
        ("mark_with_first", ("left", "right"), "right(left(swept))", 2),
    ],
)
def test_two_features_that_claim_one_decorator_get_it_once(house, impl, contexts, expected, applied):
    """A decorator of two features is applied once, or twice if it reads differing parts of their contexts."""
    source = (house.folder / "house_impl.py").read_text()
    source += "\ndef mark_with_context(original, context): return mark(context)(original)\n"
    source += "\nfrom mindspeed_dsa.patches.compose import depends_on\n"
    source += "\n@depends_on(lambda context: context[0])\n"
    source += "def mark_with_first(original, context): return mark(context)(original)\n"
    house.write({"house_impl.py": source})
    manager = PatchManager()
    house.managers.append(manager)
    row = patch("core:Room.sweep", impl=f"house_impl:{impl}")
    manager.plan(Claim(f"f{i}", row, i, context) for i, context in enumerate(contexts))
    manager.check()
    manager.arm()
    assert load("house.core").Room().sweep() == expected
    (site,) = manager.report()
    assert site.stack == [f"house_impl:{impl}"] * applied
    assert site.features == ["f0", "f1"]


@pytest.mark.parametrize("imported_first", [True, False])
@pytest.mark.parametrize(
    "second",
    ["house:area", "consumer:surface", "core:Pantry.sweep"],
    ids=["re-export", "alias", "alias-of-class"],
)
def test_one_object_under_two_spellings(house, second, imported_first):
    first = "core:Room.sweep" if "sweep" in second else "core:area"
    source = (house.folder / "house/core.py").read_text()
    house.write({"house/core.py": source + "\nPantry = Room\n"})
    if imported_first:
        load("house.consumer")
    manager = house.manager(patch(first), patch(second))

    def go():
        manager.check()
        manager.arm()
        load("house.consumer")
        manager.finalize()

    with pytest.raises(PatchError, match=r"the same object as .*both rows must use the same name for it"):
        go()
    # Neither row is installed.
    assert load("house.core").area(1) == 2
    assert load("house_impl").CALLS == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_wrappers_nest_by_priority_then_by_feature_order(house, order):
    rows = [
        patch("core:Room.sweep", impl="house_impl:mark_a"),
        patch("core:Room.sweep", impl="house_impl:mark_b", priority=-1),
        patch("core:Room.sweep", impl="house_impl:mark_c"),
        patch("core:Room.sweep", "replace", "house_impl:clean"),
    ]
    house.write(
        {"house_impl.py": (house.folder / "house_impl.py").read_text() + "\ndef clean(self): return 'x'"}
    )
    manager = PatchManager()
    house.managers.append(manager)
    claims = [Claim(f"f{i}", row, i) for i, row in enumerate(rows)]
    manager.plan(claims[i] for i in order)
    manager.check()
    manager.arm()
    # A replacement is innermost, wherever its row stands.
    assert load("house.core").Room().sweep() == "c(a(b(x)))"
    (site,) = manager.report()
    assert site.stack == [f"house_impl:{name}" for name in ("mark_c", "mark_a", "mark_b", "clean")]
    assert site.features == ["f3", "f1", "f0", "f2"]
    assert site.kind == "replace+wrap"


def test_version_ranges(house):
    versions = {"house": "0.16.1+corp", "guest": "4f2a9c"}
    manager = house.armed(
        patch("core:area", versions=">=0.16,<0.17"),
        patch("core:volume", versions=">=0.17"),
        patch("guest:visit", versions=">=99"),
        patch("library:f", versions=">=99", required=False),
        version_of=versions.get,
    )
    load("guest")
    by_target = {site.target: site for site in manager.report()}
    assert by_target["house.core:area"].state == "applied"
    assert by_target["guest:visit"].state == "applied", "a commit id is no version: nobody can tell"
    assert by_target["library:f"].state == "pending", "not installed: nobody can tell"
    skipped = by_target["house.core:volume"]
    assert (skipped.state, skipped.reason) == ("skipped", "house 0.16.1+corp is outside >=0.17")
    assert load("house.core").volume.__code__.co_filename.endswith("core.py")


def test_an_unreadable_range_is_the_rows_fault(house):
    with pytest.raises(PatchDeclarationError, match=r"house\.core:area: `versions`"):
        house.manager(patch("core:area", versions="0.16 and later"))


def test_rows_for_megatron_serve_a_fork(house):
    rows = [
        Patch("megatron.core:area", "wrap", "house_impl:counted", "test"),
        Patch("megatron.core:volume", "value", "megatron.core:area", "test"),
        Patch("megatronic.core:area", "wrap", "house_impl:counted", "test"),
    ]
    manager = house.armed(*rows, root="house")
    core = load("house.core")
    assert core.area(2) == core.volume(2) == 4
    assert [site.target for site in manager.report()] == [
        "house.core:area",
        "house.core:volume",
        "megatronic.core:area",
    ]


def test_the_static_check_judges_what_is_not_imported(house):
    def look(row):
        if row.target.endswith("volume"):
            return ["volume is not in the source"], ["volume was renamed"]
        if row.target.endswith("sweep"):
            raise OSError("unreadable")
        return ["area is not in the source"], ["area was changed"]

    manager = house.manager(patch("core:area"), static_check=look)
    with pytest.raises(PatchError, match="f0: area is not in the source"):
        manager.check()
    load("house.core")
    rows = [patch("core:area"), patch("attic:volume", required=False), patch("core:Room.sweep")]
    manager = house.manager(*rows, static_check=look)
    manager.check()
    area, volume, sweep = manager.report()
    assert (area.state, area.notes) == ("planned", ["area was changed"]), "the object outranks its source"
    assert volume.state == "planned", "sys.path can grow, so it may still come"
    assert volume.notes == ["volume was renamed", "volume is not in the source"]
    assert sweep.state == "planned"
    assert "unreadable" in sweep.notes[0]


def test_planning_while_armed_is_refused(house):
    manager = house.armed(patch("core:area"))
    with pytest.raises(MindSpeedDSAError, match="undo"):
        manager.plan([])
    manager.undo()
    manager.plan([])
    assert manager.report() == []


def test_arming_twice_keeps_the_hooks(house):
    manager = house.armed(patch("core:area"))
    manager.arm()
    assert load("house.core").area(2) == 4
    assert load("house_impl").CALLS == ["area"]


@pytest.mark.parametrize(
    ("replacement", "words"),
    [
        ("def f(x, factor=2): pass", None),
        ("def f(*args, **kwargs): pass", None),
        ("def f(x, factor=2, extra=None): pass", None),
        ("def f(x, *, factor=2): pass", "does not take factor by position"),
        ("def f(x): pass", "does not take the parameter factor"),
        ("def f(factor, x): pass", "takes factor where x is passed by position"),
        ("def f(x, factor): pass", "requires factor"),
        ("def f(x, factor=2, *, scale): pass", "requires scale"),
    ],
)
def test_a_replacement_must_take_what_callers_pass(house, replacement, words):
    house.write({"house_impl.py": replacement})
    load("house.core")
    manager = house.manager(patch("core:area", "replace", "house_impl:f"))
    manager.check()
    if words is None:
        manager.arm()
        return
    with pytest.raises(PatchError, match=words):
        manager.arm()


def test_the_instance_may_have_any_name_in_a_replacement(house):
    house.write(
        {
            "house_impl.py": """
                def paint(room, colour="x"): return colour
                def unit(x=1): return -x
                def build(kind, size=1): return kind
                """
        }
    )
    house.armed(
        *(patch(f"core:Room.{name}", "replace", f"house_impl:{name}") for name in ("paint", "unit", "build"))
    )
    room = load("house.core").Room
    assert (room().paint("y"), room.unit(2), room.build(3)) == ("y", -2, room)
