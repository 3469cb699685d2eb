"""Sources of a switch's value, and refusals."""

from __future__ import annotations

import argparse

import pytest

from mindspeed_dsa import settings
from mindspeed_dsa.feature import WORDS, Flag
from mindspeed_dsa.features import all_flags
from mindspeed_dsa.patches import SettingsError

SWITCH = Flag("--use-thing", "a switch")
TRI = Flag("--thing-repair", "a repair", kind="auto")
WORD = Flag("--thing-form", "a form", kind="auto", choices=WORDS)
COUNT = Flag("--thing-count", "a number", kind="value", type=int, default=3, choices=(1, 3, 5))
LIST = Flag("--thing-list", "several", kind="value", type=float, nargs="+")
HOST = Flag("--host-flag", "Megatron's", kind="value", megatron=True)
FLAGS = (SWITCH, TRI, WORD, COUNT, LIST, HOST)


def read(api=None, environ=None, argv=()):
    return settings.read(FLAGS, api=api, environ=environ or {}, argv=argv)


def test_defaults_and_their_origin():
    resolved = read()
    assert (resolved.use_thing, resolved.thing_repair, resolved.thing_count) == (False, None, 3)
    assert resolved.setting("thing_count").who == "default"
    assert resolved.chosen() == {}


def test_api_beats_environment_beats_argv():
    argv = ["--thing-count", "1", "--unrelated", "x"]
    environ = {"MINDSPEED_DSA_THING_COUNT": "3"}
    assert read(argv=argv).setting("thing_count").who == "argv (--thing-count)"
    assert read(argv=argv).thing_count == 1
    both = read(argv=argv, environ=environ).setting("thing_count")
    assert (both.value, both.source) == (3, "environment")
    all_three = read(argv=argv, environ=environ, api={"thing_count": 5}).setting("thing_count")
    assert (all_three.value, all_three.source) == (5, "API")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("ON", True), ("no", False), ("0", False)])
def test_switches_from_the_environment(text, value):
    assert read(environ={"MINDSPEED_DSA_THING_REPAIR": text}).thing_repair is value


def test_tri_state_on_the_command_line():
    assert read(argv=["--thing-repair"]).thing_repair is True
    assert read(argv=["--no-thing-repair"]).thing_repair is False


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", None),
        ("--thing-form", True),
        ("--thing-form --use-thing", True),
        ("--thing-form on", True),
        ("--thing-form=off", False),
        ("--no-thing-form", False),
        ("--thing-form auto", "auto"),
        ("--no-thing-form --thing-form auto", "auto"),
        ("--thing-form AUTO --no-thing-form", False),
    ],
)
def test_a_tri_state_switch_with_words(words, value):
    assert read(argv=words.split()).thing_form == value
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, "ours", FLAGS)
    assert parser.parse_args(words.split()).thing_form == value
    if value is not None:
        assert read(api={"thing_form": value}).thing_form == value
        assert read(environ={"MINDSPEED_DSA_THING_FORM": str(value)}).thing_form == value


def test_host_flags_are_read_in_both_spellings():
    assert read(argv=["--host-flag", "dsa"]).host_flag == "dsa"
    assert read(argv=["--host-flag=dsa"]).host_flag == "dsa"


def test_strings_of_launchers_mean_what_they_say():
    assert read(api={"use_thing": "false"}).use_thing is False
    assert read(api={"thing_repair": "1"}).thing_repair is True
    assert read(api={"thing_repair": None}).thing_repair is None
    assert read(api={"thing_count": "3"}).thing_count == 3
    assert read(api={"thing_count": None}).thing_count == read().thing_count
    assert read(api={"thing_list": "1 2.5"}).thing_list == [1.0, 2.5]


def test_several_values():
    assert read(argv=["--thing-list", "1", "2.5"]).thing_list == [1.0, 2.5]
    assert read(environ={"MINDSPEED_DSA_THING_LIST": "1 2.5"}).thing_list == [1.0, 2.5]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"api": {"use_thingg": True}}, ["use_thingg", "did you mean use_thing?"]),
        ({"environ": {"MINDSPEED_DSA_USE_THINGS": "1"}}, ["did you mean MINDSPEED_DSA_USE_THING?"]),
        ({"environ": {"MINDSPEED_DSA_USE_THING": "maybe"}}, ["maybe", "true", "off"]),
        ({"environ": {"MINDSPEED_DSA_THING_COUNT": "x"}}, ["MINDSPEED_DSA_THING_COUNT=x", "int"]),
        ({"argv": ["--thing-count", "2"]}, ["--thing-count", "1, 3, 5"]),
        ({"argv": ["--thing-form", "both"]}, ["--thing-form=both", "auto", "off"]),
        ({"api": {"thing_repair": "auto"}}, ["thing_repair=auto", "true"]),
        ({"api": {"thing_count": 2}}, ["thing_count=2", "1, 3, 5"]),
        ({"api": {"thing_count": "2"}}, ["thing_count=2", "1, 3, 5"]),
        ({"api": {"thing_count": "x"}}, ["thing_count=x", "int"]),
        ({"api": {"thing_count": 3.0}}, ["thing_count=3.0", "int"]),
        ({"api": {"thing_count": True}}, ["thing_count=True", "int"]),
        ({"api": {"thing_count": [1, 3]}}, ["thing_count=[1, 3]", "use one value"]),
        ({"api": {"thing_list": [1, "x"]}}, ["thing_list=[1, 'x']", "float"]),
        ({"api": {"thing_list": 1.5}}, ["thing_list=1.5", "use a list"]),
        ({"api": {"use_thing": "maybe"}}, ["use_thing=maybe", "true"]),
        ({"api": {"use_thing": 2}}, ["use_thing=2", "True or False"]),
    ],
)
def test_refusals_say_what_and_what_instead(kwargs, words):
    with pytest.raises(SettingsError) as caught:
        read(**kwargs)
    for word in words:
        assert word in str(caught.value)


def test_all_refusals_come_in_one_message():
    with pytest.raises(SettingsError) as caught:
        read(api={"bogus": 1}, environ={"MINDSPEED_DSA_THING_COUNT": "2"})
    assert "bogus" in str(caught.value)
    assert "MINDSPEED_DSA_THING_COUNT" in str(caught.value)


def test_one_name_cannot_mean_two_things():
    with pytest.raises(SettingsError, match="--use-thing is declared twice"):
        settings.unique([SWITCH, Flag("--use-thing", "something else")])
    other = Flag("--other", "another", aliases=("--use-thing",))
    with pytest.raises(SettingsError, match="--use-thing is declared by --use-thing and by --other"):
        settings.unique([SWITCH, other])


def test_what_is_mentioned():
    assert read(argv=["--lr", "1e-3", "-x"]).mentioned == ()
    assert read(argv=["--use-thing"]).mentioned == ("--use-thing",)
    assert read(argv=["--use-thingg"]).mentioned == ("--use-thingg",)
    assert read(argv=["--help"]).mentioned == ("--help",)
    assert read(argv=["--", "--use-thing"]).mentioned == ()
    assert read(argv=["--host-flag", "dsa"]).mentioned == ()


def test_flags_in_somebody_elses_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--thing-count", type=str, default="the job's own")
    settings.add_flags(parser, "ours", FLAGS)
    args = parser.parse_args(["--use-thing", "--no-thing-repair"])
    assert (args.use_thing, args.thing_repair, args.thing_count) == (True, False, "the job's own")
    assert not hasattr(args, "host_flag")
    assert "a switch" in parser.format_help()


def test_a_flag_that_lacks_one_of_our_words_is_another_flag():
    """Megatron's own flags need no warning."""
    flags = all_flags()
    assert settings.near_misses(["--recompute-num-layers", "1"], flags) == {}
    assert settings.near_misses(["--recompute-nrom-num-layers"], flags) == {
        "--recompute-nrom-num-layers": "--recompute-norm-num-layers"
    }


@pytest.mark.parametrize("name", settings.REMOVED)
def test_removed_flags_are_refused_with_the_way_out(name):
    assert name not in {flag.name for flag in all_flags()}
    flag, remedy = Flag(name, ""), settings.REMOVED[name]
    for source in (
        {"argv": ["--other", name, "x"]},
        {"argv": [f"{name}=x"]},
        {"environ": {flag.env: "x"}},
        {"api": {flag.dest: "x"}},
    ):
        with pytest.raises(SettingsError) as refused:
            read(**source)
        assert str(refused.value) == f"mindspeed_dsa: {name} was removed: {remedy}"
    read(argv=["--", name])
